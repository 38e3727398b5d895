"""Graph back ends and fixed shapes give what exact eager gives, whoever shares the batch.

Static shapes pad rows, cameras and tokens to full buckets; surplus tokens write to a sentinel slot.
The eager twin with the buckets of the graphs checks that without a compiler.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai import DeviceConfig, Engine, EngineConfig, RuntimeConfig
from phyai.errors import ConfigError
from phyai.graph import GraphService
from phyai.models.pi.adapter import PiRequest
from phyai.models.pi05.denoiser import PI05Denoiser
from phyai.types import RTCOptions
from tests.pi.tiny_requests import (
    MODELS,
    cpu_config,
    engine_of,
    pi_config,
    random_request,
)

ATOL = 5e-5

# camera masks and prompt lengths per row
REQUESTS: dict[str, tuple[list[list[bool]], list[int]]] = {
    "one row": ([[True, True]], [7]),
    "one row, masked camera": ([[False, True, True]], [24]),
    "one row, one token": ([[True]], [1]),
    "two rows": ([[True, True], [True, True]], [9, 9]),
    "two ragged rows": ([[True, False], [True, True]], [3, 12]),
    "three ragged rows": ([[True, False, True], [False, False, True], [True] * 3], [6, 24, 1]),
}


@pytest.fixture(scope="module")
def exact() -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        yield {model: stack.enter_context(engine_of(model)) for model in MODELS}


@pytest.fixture(scope="module")
def static() -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        config = cpu_config(static_shapes=True)
        yield {model: stack.enter_context(engine_of(model, config)) for model in MODELS}


def stats_of(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.stats()["replicas"][0]["graphs"]
    return found


def pick(request: PiRequest, rows: tuple[int, ...]) -> PiRequest:
    """Return a request of some rows, in that order."""
    values: dict[str, Any] = {
        f.name: value[list(rows)]
        for f in fields(request)
        if isinstance(value := getattr(request, f.name), Tensor)
    }
    return replace(request, **values)


# ---------------------------------------------------------------- the eager twin


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", REQUESTS)
def test_static_shapes_equal_exact_shapes(
    model: str, case: str, exact: dict[str, Engine], static: dict[str, Engine]
) -> None:
    masks, lens = REQUESTS[case]
    request = random_request(model, masks, lens, pad_to=24, seed=1)
    want = exact[model].step(request)
    torch.testing.assert_close(static[model].step(request), want, atol=ATOL, rtol=0)
    assert static[model].core.services.graphs.static_shapes
    assert not exact[model].core.services.graphs.static_shapes
    assert stats_of(static[model])["backend"] == "eager"


@pytest.mark.parametrize(
    ("model", "rtc"),
    [
        ("pi0", RTCOptions(torch.full((6, 8), 0.3), 2, 5, mode="guided")),
        ("pi05", RTCOptions(torch.full((6, 8), 0.3), 2, 5, mode="guided")),
        ("pi05", RTCOptions(torch.full((6, 8), 0.3), 3, mode="trained")),
    ],
    ids=["pi0 guided", "pi05 guided", "pi05 trained"],
)
def test_static_shapes_equal_exact_shapes_with_rtc(model: str, rtc: RTCOptions) -> None:
    config = pi_config(model, rtc_training_max_delay=6 if rtc.mode == "trained" else 0)
    masks, lens = REQUESTS["three ragged rows"]
    request = random_request(model, masks, lens, seed=2, rtc=[rtc, None, rtc])
    with (
        engine_of(model, config=config) as plain,
        engine_of(model, cpu_config(static_shapes=True), config=config) as padded,
    ):
        want = plain.step(request)
        torch.testing.assert_close(padded.step(request), want, atol=ATOL, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_nothing_of_earlier_requests_is_left(
    model: str, exact: dict[str, Engine], static: dict[str, Engine]
) -> None:
    """A cache is used again by shorter requests of its bucket; stale slots must stay unseen."""
    long = random_request(model, [[True, True], [True, True]], [24, 24], seed=3)
    short = random_request(model, [[True, True], [True, False]], [17, 17], pad_to=24, seed=4)
    before = static[model].step(short)
    static[model].step(long)
    assert torch.equal(static[model].step(short), before)
    torch.testing.assert_close(before, exact[model].step(short), atol=ATOL, rtol=0)


@pytest.mark.parametrize("model", MODELS)
def test_a_row_does_not_depend_on_who_shares_its_bucket(
    model: str, static: dict[str, Engine]
) -> None:
    """Bit for bit: whatever the other rows hold, however many there are, in any order."""
    masks = [[True, True, True], [True, False, True], [False, True, False], [True, True, False]]
    request = random_request(model, masks, [24, 6, 13, 1], pad_to=24, num_steps=2, seed=5)
    full = static[model].step(request)
    for rows in [*permutations(range(4)), (0, 1, 2), (3, 1, 0), (2, 0, 3)]:
        got = static[model].step(pick(request, rows))
        assert torch.equal(got, full[list(rows)]), f"rows {rows}"


@pytest.mark.parametrize("model", MODELS)
def test_a_row_does_not_depend_on_the_content_of_other_rows(
    model: str, static: dict[str, Engine]
) -> None:
    first = random_request(model, [[True, True]], [24], seed=6)
    results = []
    for seed, (masks, lens) in enumerate(
        [
            ([[True, True], [True, False]], [24, 1]),
            ([[False, True], [False, True]], [9, 13]),
            ([[True, True], [True, True]], [17, 24]),
        ]
    ):
        others = random_request(model, masks, lens, pad_to=24, seed=100 + seed)
        joined: dict[str, Any] = {
            f.name: torch.cat([value, getattr(others, f.name)])
            for f in fields(first)
            if isinstance(value := getattr(first, f.name), Tensor)
        }
        results.append(static[model].step(replace(first, **joined))[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# ---------------------------------------------------------------- settings


def test_static_shapes_setting() -> None:
    device = torch.device("cpu")
    assert not GraphService("eager", device).static_shapes
    assert GraphService("eager", device, static_shapes=True).static_shapes
    assert GraphService("inductor", device).static_shapes
    with pytest.raises(ConfigError, match="static shapes must be on for graph backend 'inductor'"):
        GraphService("inductor", device, static_shapes=False)
    with pytest.raises(ConfigError, match=r"RuntimeConfig\.static_shapes must be True or False"):
        RuntimeConfig(static_shapes=1)  # type: ignore[arg-type]


def test_static_shapes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    base = EngineConfig(device=DeviceConfig(target="cpu"))
    for text, value in (("1", True), ("off", False), ("none", None)):
        monkeypatch.setenv("PHYAI_STATIC_SHAPES", text)
        assert EngineConfig.from_env(base).runtime.static_shapes is value


# ---------------------------------------------------------------- compiled regions


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make back end ``inductor`` trace regions whole but not compile them; return graph sizes."""
    sizes: list[int] = []

    def keep(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        sizes.append(len(module.graph.nodes))
        return module.forward

    compile_ = torch.compile

    def trace(fn: Callable[[], object], **options: Any) -> Callable[[], object]:
        options["backend"], options["options"] = keep, None
        return compile_(fn, **options)

    monkeypatch.setattr(torch, "compile", trace)
    return sizes


@pytest.mark.parametrize("model", ["pi05", pytest.param("pi0", marks=pytest.mark.slow)])
def test_regions_are_traced_whole_and_once(model: str, traced: list[int]) -> None:
    """No graph break, and no second trace for other data or when another step count comes by."""
    masks, lens = REQUESTS["three ragged rows"]
    other_masks = [[True, True, False], [True, True, True], [False, True, False]]
    first = random_request(model, masks, lens, num_steps=1, seed=1)
    second = random_request(model, other_masks, [2, 19, 24], num_steps=1, seed=2)
    small = {"checkpoint_dir": None, "config": pi_config(model, layers=2)}
    with (
        engine_of(model, **small) as exact,
        engine_of(model, cpu_config(graph_backend="inductor"), **small) as engine,
    ):
        for request in (first, second, replace(first, num_steps=2), first, second):
            want = exact.step(request)
            torch.testing.assert_close(engine.step(request), want, atol=ATOL, rtol=0)
        assert len(traced) == 4  # encode and solve of two keys
        stats = stats_of(engine)
        assert (stats["captures"], stats["fallbacks"], stats["replays"]) == (4, 0, 10)
        recorder = engine.core.services.profile.recorder
        with recorder.recording() as records:  # the recorder hears eager code
            torch.testing.assert_close(engine.step(first), exact.step(first), atol=ATOL, rtol=0)
        assert len(records["steps.action.velocity"]) == 1
        assert stats_of(engine)["replays"] == 10
        assert len(traced) == 4


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_inductor_equals_eager(model: str) -> None:
    """One layer of each stack: compile time grows with the layers, what is compiled does not."""
    small = {"checkpoint_dir": None, "config": pi_config(model, layers=1)}
    masks, lens = REQUESTS["three ragged rows"]
    with (
        engine_of(model, **small) as eager,
        engine_of(model, cpu_config(graph_backend="inductor"), **small) as compiled,
    ):
        for seed, rows in enumerate([(0, 1, 2), (2, 1, 0)]):
            request = random_request(model, masks, lens, num_steps=1, seed=seed)
            want = eager.step(pick(request, rows))
            got = compiled.step(pick(request, rows))
            torch.testing.assert_close(got, want, atol=ATOL, rtol=0)
        stats = stats_of(compiled)
    assert stats["captures"] + stats["fallbacks"] == 2
    assert stats["fallbacks"] in (0, 2)  # all, on a machine without a compiler
    print({row["name"]: round(row["compile_s"], 1) for row in stats["regions"]})


NO_COMPILER = """
import logging, os, sys
import torch

torch.set_num_threads(1)
logging.basicConfig(level=logging.WARNING, format="%(name)s|%(message)s", stream=sys.stdout)
from tests.cpu_engines import reference_config  # inductor cannot lower packed weights
from tests.pi.tiny_requests import engine_of, random_request

request = random_request("pi05", [[True], [True]], [5, 3], num_steps=1)
with engine_of("pi05") as eager:
    want = eager.step(request)
with engine_of("pi05", reference_config(graph_backend="inductor")) as engine:
    got = [engine.step(request) for _ in range(2)]
    stats = engine.stats()["replicas"][0]["graphs"]
assert all(torch.allclose(x, want, atol=5e-5) for x in got)
assert (stats["captures"], stats["fallbacks"]) == (0, 2), stats
"""


@pytest.mark.slow
def test_without_a_compiler_everything_runs_eagerly_and_says_so_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER],
        cwd=Path(__file__).parents[2],
        env={
            "PATH": str(tmp_path),
            "HOME": str(tmp_path),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("phyai.graph|")]
    assert lines == [
        "phyai.graph|region cache1/encode and all others run eagerly: no C++ compiler was found"
    ]


def test_unsafe_parts_keep_a_region_eager(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    monkeypatch.setattr(PI05Denoiser, "capture_safe", False)
    request = random_request("pi05", [[True]], [5], num_steps=1)
    with (
        caplog.at_level(logging.WARNING, "phyai.graph"),
        engine_of("pi05", cpu_config(graph_backend="inductor")) as engine,
    ):
        engine.step(request)
        modes = {row["name"]: row["mode"] for row in stats_of(engine)["regions"]}
    assert modes == {"cache1/encode": "inductor", "cache1/solve": "eager"}
    (record,) = (r for r in caplog.records if r.name == "phyai.graph")
    assert record.getMessage().startswith("region cache1/solve runs eagerly: part ")
