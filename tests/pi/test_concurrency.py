"""Mixed requests from many threads give what each gives alone, and memory stays where it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import Engine
from phyai.types import RTCOptions
from tests.pi.mixed_requests import DISTINCT, TOTAL, digest, mixed
from tests.pi.tiny_engines import model_request, observation, open_engine

ROOT = Path(__file__).parents[2]
BATCH_TOLERANCE = 5e-5
"""Largest difference of a row alone and in a batch: other shapes round differently."""
STREAMS = (("pi05", 1), ("pi05", 2), ("pi0", 3))


@pytest.fixture(scope="module")
def streams() -> dict[tuple[str, int], dict[str, Any]]:
    """Return what each stream printed, every one from a fresh process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    started = {
        (model, seed): subprocess.Popen(
            [sys.executable, "-m", "tests.pi.mixed_requests", model, str(seed)],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for model, seed in STREAMS
    }
    printed = {}
    for name, process in started.items():
        out, err = process.communicate(timeout=280)
        assert process.returncode == 0, err
        printed[name] = json.loads(out)
    return printed


@pytest.fixture(scope="module", params=["pi05", "pi0"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with open_engine(request.param) as engine:
        yield engine


# ---------------------------------------------------------------- streams


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_mixed_requests_succeeds(streams: Any, name: tuple[str, int]) -> None:
    stream = streams[name]
    assert stream["problems"] == []
    assert stream["done"] == len(stream["results"]) == TOTAL
    assert {number for number, _ in stream["results"]} == set(range(DISTINCT))
    assert stream["live_caches"] == 16  # more keys than live caches: some had to leave


@pytest.mark.slow
@pytest.mark.parametrize("name", STREAMS)
def test_memory_after_request_200_is_that_after_request_50(
    streams: Any, name: tuple[str, int]
) -> None:
    resident = streams[name]["resident"]
    assert resident["200"] - resident["50"] <= 16 * 2**20


@pytest.mark.slow
def test_every_result_is_that_of_the_request_alone(streams: Any, engine: Engine) -> None:
    model = engine.args.plugin
    alone = {number: digest(engine.step(mixed(engine, number))) for number in range(DISTINCT)[::-1]}
    for number in range(0, DISTINCT, 10):  # and on an engine that has seen nothing else
        with open_engine(model) as fresh:
            assert digest(fresh.step(mixed(fresh, number))) == alone[number]
    for name in STREAMS:
        if name[0] == model:
            differing = [n for n, value in streams[name]["results"] if value != alone[n]]
            assert differing == []


def test_the_stream_holds_every_kind_of_request(engine: Engine) -> None:
    requests = [mixed(engine, number) for number in range(DISTINCT)]
    models = [r for r in requests if hasattr(r, "pixel_values")]
    lists = [r for r in requests if isinstance(r, list)]
    assert min(len(models), len(lists), len(requests) - len(models) - len(lists)) >= 5
    assert {r.pixel_values.shape[:2] for r in models} >= {(1, 1), (3, 3)}
    assert any(len(set(r.lang_lens.tolist())) == 3 for r in models)
    assert any(r.rtc is not None for r in models)
    assert any(r.image_masks is not None for r in models)


# ---------------------------------------------------------------- rows


def row_of(request: Any, row: int) -> Any:
    """Return one row of a model request as a request."""
    picked = {
        field.name: value[row : row + 1]
        for field in fields(request)
        if isinstance(value := getattr(request, field.name), torch.Tensor)
    }
    return replace(request, **picked)


@pytest.mark.parametrize("cameras", [1, 3])
def test_a_row_of_a_model_request_is_that_row_alone(engine: Engine, cameras: int) -> None:
    for seed in range(3):
        request = model_request(engine, seed, rows=3, cameras=cameras, num_steps=4)
        assert len(set(request.lang_lens.tolist())) > 1
        if cameras == 3:
            masks = torch.tensor([[True, False, True], [True, True, True], [False, True, False]])
            request = replace(request, image_masks=masks)
        whole = engine.step(request)
        for row in range(3):
            single = engine.step(row_of(request, row))
            torch.testing.assert_close(whole[row], single[0], atol=BATCH_TOLERANCE, rtol=0)


def test_a_row_with_rtc_is_that_row_alone(engine: Engine) -> None:
    request = model_request(engine, 5, rows=3, num_steps=4)
    chunk = np.linspace(-1, 1, 42, dtype=np.float32).reshape(6, 7)
    rtc = [RTCOptions(chunk, 1), None, RTCOptions(-chunk[:3], 2, 3, "LINEAR", 2.0)]
    whole = engine.step(replace(request, rtc=rtc))
    for row in range(3):
        single = engine.step(replace(row_of(request, row), rtc=[rtc[row]]))
        torch.testing.assert_close(whole[row], single[0], atol=BATCH_TOLERANCE, rtol=0)


def test_a_row_of_a_list_is_that_observation_alone(engine: Engine) -> None:
    rows = [observation(engine, seed, cameras=1 + seed) for seed in range(3)]
    together = engine.step(rows)
    for row, chunk in zip(rows, together, strict=True):
        alone = engine.step(row)
        np.testing.assert_allclose(
            chunk.model_actions, alone.model_actions, atol=BATCH_TOLERANCE, rtol=0
        )
        assert chunk.info == alone.info


# ---------------------------------------------------------------- seeds


def test_the_same_seed_or_noise_gives_the_same_bits(engine: Engine) -> None:
    row = observation(engine, 1)
    first, reseeded = digest(engine.step(row)), replace(row, options={**row.options, "seed": 2})
    torch.manual_seed(123)
    assert digest(engine.step(observation(engine, 1))) == first
    assert digest(engine.step(reseeded)) != first
    request = replace(model_request(engine, 1, noise=None), seed=7)
    assert digest(engine.step(request)) == digest(engine.step(request))
    noise = torch.randn(2, 10, 8, generator=torch.Generator().manual_seed(7))
    assert digest(engine.step(replace(request, noise=noise))) == digest(engine.step(request))


def test_without_a_seed_every_request_draws_its_own_noise(engine: Engine) -> None:
    request = model_request(engine, 1, noise=None)
    before = torch.get_rng_state()
    assert digest(engine.step(request)) != digest(engine.step(request))
    assert torch.equal(torch.get_rng_state(), before)  # from a generator of its own


# ---------------------------------------------------------------- per-step tables


def test_tables_of_step_counts_do_not_pile_up() -> None:
    with open_engine("pi05", {"max_live_caches": 3}) as engine:
        adapter: Any = engine.adapter
        want = digest(engine.step(observation(engine, 0, 1, num_steps=1)))
        for steps in range(1, 12):
            engine.step(observation(engine, 0, 1, num_steps=steps))
        assert sorted(len(sigmas) for sigmas in adapter.network.tables) == [9, 10, 11]
        assert digest(engine.step(observation(engine, 0, 1, num_steps=1))) == want
