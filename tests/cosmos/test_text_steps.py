"""With graphs, texts of similar lengths share a key; what is padded is seen by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from phyai import Engine
from phyai.errors import ConfigError
from tests.cosmos.cosmos_engines import POLICY, action_request, engine_of, ids, policy_args
from tests.cpu_engines import cpu_config

LOOP = 1e-4


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    with engine_of(POLICY) as engine:
        yield engine


@pytest.fixture(scope="module")
def padded() -> Iterator[Engine]:
    with engine_of(POLICY, cpu_config(static_shapes=True)) as engine:
        yield engine


def asked(cond: int, uncond: int = 5, rows: int = 1, **changes: Any) -> Any:
    texts = {"text_ids": ids(cond, rows), "neg_text_ids": ids(uncond, rows, seed=1)}
    return action_request(rows, **texts, **changes)


def test_texts_are_padded_with_static_shapes_alone(exact: Engine, padded: Engine) -> None:
    def sizes(engine: Engine, request: Any) -> tuple[int, int]:
        key = engine.adapter.prepare(request).key
        return key.bucket("tokens"), key.bucket("uncond.tokens")

    assert sizes(exact, asked(17, 5)) == (17, 5)
    assert sizes(padded, asked(17, 5)) == (32, 16)
    assert sizes(padded, asked(16, 16)) == (16, 16)
    pairs = [(1, 3), (9, 16), (16, 4), (16, 16)]
    assert len({padded.adapter.prepare(asked(*pair)).key for pair in pairs}) == 1


@pytest.mark.parametrize("lengths", [(9, 5), (16, 16), (17, 15)])
def test_padded_texts_give_what_exact_ones_give(
    lengths: tuple[int, int], exact: Engine, padded: Engine
) -> None:
    request = asked(*lengths)
    want, got = exact.step(request), padded.step(request)
    assert all(float((got[leaf] - want[leaf]).abs().max()) < LOOP for leaf in want)


def test_prompts_of_other_lengths_use_the_buffers_that_are_there(padded: Engine) -> None:
    """A long text leaves keys behind a short one's; the short one is as in a fresh engine."""
    first = padded.step(asked(3))
    live = len(padded.core.runner._bound)
    padded.step(asked(15))
    assert torch.equal(padded.step(asked(3))["action"], first["action"])
    assert len(padded.core.runner._bound) == live


def test_a_row_is_the_same_beside_texts_of_any_length(padded: Engine) -> None:
    """Rows of one bucket: other texts and pictures in the other row change no bit."""
    seen = []
    for count in (3, 9, 16):
        mask = torch.ones(2, 16, dtype=torch.int64)
        mask[0, 9:] = mask[1, count:] = 0
        request = asked(16, rows=2, text_mask=mask)
        latents = request.cond_video_latents.clone()
        latents[1] *= count
        texts = request.text_ids.clone()
        texts[1] = ids(16, seed=count)[0]
        changes = {"text_ids": texts, "cond_video_latents": latents}
        seen.append(padded.step(replace(request, **changes)))
    for leaf, want in seen[0].items():
        assert all(torch.equal(other[leaf][0], want[0]) for other in seen[1:])
        assert not torch.equal(seen[1][leaf][1], want[1])


def test_rows_of_different_lengths_are_each_as_alone(padded: Engine) -> None:
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, 4:] = 0
    both = asked(13, rows=2, text_mask=mask)
    noise = padded.adapter.prepare(both).tensors
    together = padded.step(both)["action"]
    for row, count in enumerate((13, 4)):
        of_row = {
            name: getattr(both, name)[row : row + 1]
            for name in ("neg_text_ids", "cond_video_latents", "cond_action")
        }
        leaves = {leaf: noise[f"noise.{leaf}"][row : row + 1] for leaf in ("video", "action")}
        text = both.text_ids[row : row + 1, :count]
        alone = replace(both, text_ids=text, text_mask=None, noise=leaves, **of_row)
        got = padded.step(alone)["action"]
        assert float((got - together[row : row + 1]).abs().max()) < LOOP


def test_a_step_of_one_keeps_every_length_apart() -> None:
    with engine_of(POLICY, cpu_config(static_shapes=True), text_step=1) as engine:
        key = engine.adapter.prepare(asked(9, 5)).key
        assert (key.bucket("tokens"), key.bucket("uncond.tokens")) == (9, 5)
        assert dict(key.extra)["even"] == ("cond", "uncond")
        assert engine.step(asked(9, 5))["action"].shape[0] == 1
    with pytest.raises(ConfigError, match=r"text_step must be an integer in \[1, 1024\]"):
        policy_args(text_step=0)
