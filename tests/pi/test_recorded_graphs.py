"""Both models through recorded graphs: what a GPU would replay gives what eager gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from phyai import Engine
from phyai.types import RTCOptions
from tests.cpu_engines import reference_config
from tests.pi.recorded_engines import recorded_engine
from tests.pi.test_graph_backends import ATOL, REQUESTS, pick, stats_of
from tests.pi.tiny_requests import MODELS, engine_of, pi_config, random_request


def small(model: str, layers: int = 2, **changes: Any) -> dict[str, Any]:
    """Return arguments of a model with few layers and random weights, the same ones every time."""
    return {"checkpoint_dir": None, "config": pi_config(model, layers=layers, **changes)}


Engines = dict[str, tuple[Engine, Engine]]


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """Per model: exact eager shapes, and recorded graphs."""
    with ExitStack() as stack:
        yield {
            model: (
                stack.enter_context(engine_of(model, reference_config(), **small(model))),
                stack.enter_context(recorded_engine(model, **small(model))),
            )
            for model in MODELS
        }


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", REQUESTS)
def test_replays_equal_eager(model: str, case: str, engines: Engines) -> None:
    """The first request captures, the second only replays: other images, prompts and noise."""
    exact, recorded = engines[model]
    masks, lens = REQUESTS[case]
    for seed in (1, 2):
        request = random_request(model, masks, lens, pad_to=24, num_steps=2, seed=seed)
        want = exact.step(request)
        torch.testing.assert_close(recorded.step(request), want, atol=ATOL, rtol=0)
    stats = stats_of(recorded)
    assert (stats["backend"], stats["fallbacks"]) == ("cuda", 0)
    assert {row["mode"] for row in stats["regions"]} == {"cuda"}


@pytest.mark.parametrize(
    ("model", "mode"), [("pi0", "guided"), ("pi05", "guided"), ("pi05", "trained")]
)
def test_replays_equal_eager_with_rtc(model: str, mode: Any) -> None:
    args = small(model, 1, rtc_training_max_delay=6 if mode == "trained" else 0)
    masks, lens = REQUESTS["three ragged rows"]
    with (
        engine_of(model, reference_config(), **args) as exact,
        recorded_engine(model, **args) as recorded,
    ):
        for seed, delay in ((2, 3), (3, 1)):
            execute = 5 if mode == "guided" else None
            rtc = RTCOptions(torch.full((6, 8), 0.1 * seed), delay, execute, mode=mode)
            rows = [rtc, None, rtc]
            request = random_request(model, masks, lens, num_steps=2, seed=seed, rtc=rows)
            want = exact.step(request)
            torch.testing.assert_close(recorded.step(request), want, atol=ATOL, rtol=0)
        assert stats_of(recorded)["fallbacks"] == 0


def test_one_capture_per_bucket_of_rows_cameras_tokens_and_steps() -> None:
    """Data (masks, lengths within a bucket, noise) captures nothing; a bucket captures once."""
    sizes = [
        ([[True, True]], [7], 2),
        ([[True, True]], [16], 2),  # the same bucket of 16 tokens
        ([[True, True]], [17], 2),  # 24 tokens
        ([[True]], [7], 2),  # one camera
        ([[True], [True]], [7, 3], 2),  # two rows
        ([[True]] * 3, [7, 3, 1], 2),  # four rows
        ([[True]] * 4, [7, 3, 1, 9], 2),
        ([[True]], [7], 3),  # three steps
    ]
    captures = []
    with recorded_engine("pi05", **small("pi05", 1)) as engine:
        for _ in range(2):
            for seed, (masks, lens, steps) in enumerate(sizes):
                engine.step(
                    random_request("pi05", masks, lens, pad_to=24, num_steps=steps, seed=seed)
                )
                captures.append(stats_of(engine)["captures"])
        regions = stats_of(engine)["regions"]
        report = engine.core.memory_report()
    assert captures == [2, 2, 4, 6, 8, 10, 10, 12, *[12] * 8]
    assert len(regions) == 12
    assert report["graphs"] == sum(row["nbytes"] for row in regions) > 0


def test_least_recently_used_graphs_make_room() -> None:
    with recorded_engine("pi05", limit=2, **small("pi05", 1)) as engine:
        one, two = (random_request("pi05", [[True]], [n], pad_to=24, num_steps=1) for n in (7, 20))
        want = [engine.step(one), engine.step(two)]
        assert torch.equal(engine.step(one), want[0])
        stats = stats_of(engine)
    assert len(stats["regions"]) == 2
    assert (stats["captures"], stats["recaptures"], stats["fallbacks"]) == (6, 0, 0)


# ---------------------------------------------------------------- weights that change


def perturbed(engine: Engine) -> dict[str, torch.Tensor]:
    """Return new values for all parameters, by module path."""
    modules: nn.Module = engine.adapter.modules  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(7)
    return {
        name: p * (1 + 0.2 * torch.rand(p.shape, generator=generator, dtype=p.dtype))
        for name, p in modules.named_parameters()
    }


@pytest.mark.parametrize("model", MODELS)
def test_an_update_in_place_recaptures_nothing(model: str) -> None:
    request = random_request(model, *REQUESTS["two ragged rows"], num_steps=2, seed=3)
    args = small(model)
    with (
        engine_of(model, reference_config(), **args) as exact,
        recorded_engine(model, **args) as recorded,
    ):
        before = recorded.step(request)
        for engine in (exact, recorded):
            values = perturbed(engine)
            for name, p in engine.adapter.modules.named_parameters():  # type: ignore[attr-defined]
                p.copy_(values[name])
            engine.core.runner.refresh()
        after = recorded.step(request)
        torch.testing.assert_close(after, exact.step(request), atol=ATOL, rtol=0)
        stats = stats_of(recorded)
    assert (after - before).abs().max() > 100 * ATOL
    assert (stats["captures"], stats["recaptures"], stats["fallbacks"]) == (2, 0, 0)


def test_a_replaced_parameter_recaptures_its_graphs_once() -> None:
    request = random_request("pi05", *REQUESTS["two ragged rows"], num_steps=2, seed=3)
    args = small("pi05", 1)
    with (
        engine_of("pi05", reference_config(), **args) as exact,
        recorded_engine("pi05", **args) as recorded,
    ):
        recorded.step(request)
        for engine in (exact, recorded):
            network: Any = engine.adapter.network  # type: ignore[attr-defined]
            network.action_out.weight = nn.Parameter(1.5 * network.action_out.weight, False)
        stale = recorded.step(request)
        want = exact.step(request)
        assert (stale - want).abs().max() > 100 * ATOL  # the graph still reads the old address
        recorded.core.runner.refresh()
        torch.testing.assert_close(recorded.step(request), want, atol=ATOL, rtol=0)
        recorded.core.runner.refresh()
        recorded.step(request)
        stats = stats_of(recorded)
    assert (stats["captures"], stats["recaptures"], stats["fallbacks"]) == (4, 2, 0)


# ---------------------------------------------------------------- what the stand-in catches


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("a value on the host", "got __float__(), which waits for the device"),
        ("host memory", "must be a buffer of its cache or a tensor of the model"),
    ],
)
def test_host_work_in_a_denoiser_falls_back(
    where: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phyai.models.pi05.denoiser import PI05Denoiser

    forward = PI05Denoiser.forward
    host = torch.full((1,), 1.0)

    def careless(self: Any, x: Any, step: Any, cache: Any) -> Any:
        out = forward(self, x, step, cache)
        factor = float(x["action"].isfinite().all()) if where == "a value on the host" else host
        return {"action": out["action"] * factor}

    monkeypatch.setattr(PI05Denoiser, "forward", careless)
    request = random_request("pi05", [[True]], [5], num_steps=1)
    args = small("pi05", 1)
    with (
        engine_of("pi05", reference_config(), **args) as exact,
        recorded_engine("pi05", **args) as recorded,
    ):
        want = exact.step(request)
        torch.testing.assert_close(recorded.step(request), want, atol=ATOL, rtol=0)
        rows = {row["name"]: row for row in stats_of(recorded)["regions"]}
    assert rows["cache1/encode"]["mode"] == "cuda"
    assert rows["cache1/solve"]["mode"] == "eager"
    assert problem in rows["cache1/solve"]["reason"]


def test_rows_of_a_bucket_are_independent_in_a_replay(engines: Engines) -> None:
    _, recorded = engines["pi05"]
    masks = [[True, True, True], [True, False, True], [False, True, False], [True, True, False]]
    request = random_request("pi05", masks, [24, 6, 13, 1], pad_to=24, num_steps=2, seed=5)
    full = recorded.step(request)
    for rows in [(3, 2, 1, 0), (0, 1, 2), (2, 0, 3)]:
        assert torch.equal(recorded.step(pick(request, rows)), full[list(rows)]), rows
    assert torch.equal(recorded.step(replace(request)), full)
