"""pi0.5 requests that share a batch: to the bit in one bucket, within tolerance across buckets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.types import RTCOptions
from tests.pi.tiny_engines import model_request, observation, open_engine

ATOL = 2e-5
FOREVER_MS = 1e9  # only a full batch starts before that
JOIN = {"batch_wait_ms": FOREVER_MS, "static_shapes": True}


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    """One that joins, one that runs every request alone."""
    with open_engine("pi05", JOIN) as joins, open_engine("pi05", {"static_shapes": True}) as alone:
        yield joins, alone


def run(engine: Engine, *requests: Any) -> list[Any]:
    futures = [engine.submit(request) for request in requests]
    return [future.result(60) for future in futures]


def joined(engine: Engine) -> int:
    return int(engine.stats()["replicas"][0]["batches"]["joined"])


def test_four_robots_share_a_batch_and_each_gets_its_own_chunk(
    engines: tuple[Engine, Engine],
) -> None:
    joins, alone = engines
    before = joined(joins)
    robots = [observation(alone, seed) for seed in (0, 3, 6, 9)]  # prompts of one bucket
    together = run(joins, *robots)
    assert joined(joins) - before == 4
    for ours, robot in zip(together, robots, strict=True):
        np.testing.assert_allclose(ours.actions, alone.step(robot).actions, atol=ATOL, rtol=0)
        assert ours.info["batch_rows"] == 4
    same_bucket = alone.step(robots)
    for ours, want in zip(together, same_bucket, strict=True):
        assert np.array_equal(ours.actions, want.actions)
        assert np.array_equal(ours.model_actions, want.model_actions)


def test_neither_the_place_in_the_batch_nor_its_others_change_a_bit(
    engines: tuple[Engine, Engine],
) -> None:
    joins, alone = engines
    robots = [observation(alone, seed) for seed in (0, 3, 6, 9)]
    *_, last = run(joins, *robots)
    assert np.array_equal(last.model_actions, alone.step([robots[3]] * 4)[0].model_actions)


def test_a_padded_bucket_gives_the_same_bits_as_the_shared_one(
    engines: tuple[Engine, Engine],
) -> None:
    joins, alone = engines
    three, one = model_request(alone, 1, rows=3), model_request(alone, 2, rows=1)
    ours, other = run(joins, three, one)
    assert torch.equal(ours, alone.step(three))  # three rows run in the bucket of four
    torch.testing.assert_close(other, alone.step(one), atol=ATOL, rtol=0)


def test_unseeded_noise_is_each_requests_own_and_rtc_rows_stay_apart(
    engines: tuple[Engine, Engine],
) -> None:
    joins, alone = engines
    first, second, *_ = run(joins, *[replace(observation(alone), options={"num_steps": 2})] * 4)
    assert not np.allclose(first.actions, second.actions)
    left = [chunk.model_actions[2:] for chunk in (first, second)]
    guided = [
        observation(alone, 0, rtc=RTCOptions(rest, inference_delay=2, mode="guided"))
        for rest in (*left, *left)
    ]
    before = joined(joins)
    answers = run(joins, *guided)
    assert joined(joins) - before == 4
    for ours, request in zip(answers, guided, strict=True):
        np.testing.assert_allclose(ours.actions, alone.step(request).actions, atol=1e-4, rtol=0)
