"""Comparisons of golden results: what passes, and that shapes and NaN never do."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from phyai.golden import absolute, close, exact, relative, unknown

WANT = torch.tensor([[1.0, -100.0], [0.0, 2.0]])


def test_close_reports_the_entry_furthest_over() -> None:
    got = WANT + torch.tensor([[0.02, 0.5], [0.0, 0.0]])
    assert close("x", got, WANT, atol=0.02, rtol=0.01).ok
    found = close("x", got, WANT, atol=0.001, rtol=0.01)
    assert not found.ok
    assert found.error == pytest.approx(0.02, rel=1e-4)
    assert found.tolerance == pytest.approx(0.011)


@pytest.mark.parametrize(
    "compare",
    [
        partial(absolute, "x", tolerance=9.0),
        partial(close, "x", atol=9.0, rtol=9.0),
        partial(relative, "x", tolerance=9.0),
        partial(exact, "x"),
    ],
)
def test_shapes_and_nan_never_pass(compare: Any) -> None:
    assert compare(got=WANT, want=WANT).ok
    assert not compare(got=WANT[:1], want=WANT).ok
    assert not compare(got=WANT[:, :1], want=WANT).ok
    bad = WANT.clone()
    bad[0, 0] = math.nan
    assert not compare(got=bad, want=WANT).ok
    assert not compare(got=bad, want=bad).ok


def test_unknown_is_infinitely_wrong() -> None:
    assert unknown("x").error == math.inf
    assert not unknown("x").ok
    assert unknown("x").name.startswith("x ")
