"""Session checks on a stand-in: the engine keeps no sessions yet, so a small store plays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import RequestError
from phyai.testing.conformance import sessions
from phyai.testing.conformance.check import Failure, NotApplicable
from phyai.types import Observation


class Store:
    """Answers with the running sum of the states of a session."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.rows: dict[str, tuple[int, float, torch.Tensor]] = {}

    def step(self, row: Observation) -> torch.Tensor:
        name = "one for all" if self.fault == "shared" else str(row.session_id)
        seq = int(row.seq or 0)
        last, total, stored = self.rows.get(name, (-1, 0.0, torch.zeros(1)))
        if self.fault == "shared":
            last = seq - 1 if seq != last else last
        if seq == last and self.fault != "forgets":
            return stored
        if seq != last + 1 and not (self.fault == "any seq" or seq == last):
            raise RequestError(f"seq must be {last + 1}; got {seq}.")
        total += float(np.sum(row.state))
        result = torch.tensor([total])
        self.rows[name] = (seq, total, result)
        return result


def subject(fault: str = "", declared: bool = True) -> Any:
    @contextmanager
    def engine() -> Iterator[Store]:
        yield Store(fault)

    row = Observation(state=np.ones(3, np.float32))
    return SimpleNamespace(
        capability=lambda name: declared,
        takes_option=lambda name: False,
        observation=lambda: row,
        engine=engine,
    )


CHECKS: list[Callable[[Any], None]] = [check.run for check in sessions.CHECKS]


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_right_sessions_pass(check: Callable[[Any], None]) -> None:
    check(subject())
    with pytest.raises(NotApplicable, match="declare no sessions"):
        check(subject(declared=False))


@pytest.mark.parametrize(
    ("fault", "check", "message"),
    [
        ("forgets", sessions.session_repeats_a_stored_result, "must give its stored result"),
        ("any seq", sessions.session_refuses_a_wrong_seq, "seq 2 after seq 0 must be a Request"),
        ("shared", sessions.sessions_stay_apart, "must not notice another session"),
    ],
)
def test_wrong_sessions_are_caught(fault: str, check: Callable[[Any], None], message: str) -> None:
    with pytest.raises(Failure, match=message):
        check(subject(fault))
