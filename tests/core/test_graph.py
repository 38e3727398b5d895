"""Regions in every back end, the captured graph, and what happens when capture is impossible."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError, CudaGraphError
from phyai.graph import (
    CudaGraph,
    GraphService,
    Region,
    capture_on_stream,
    capturing,
)

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Work:
    """A region's function over two static buffers, counting how often its Python runs."""

    def __init__(self, size: int = 4, device: str = "cpu") -> None:
        self.x = torch.arange(size, dtype=torch.float32, device=device)
        self.y = torch.zeros(size, device=device)
        self.runs = 0

    def run(self) -> None:
        self.runs += 1
        self.y.copy_(torch.sin(self.x) * 2 + 1)

    def pure(self) -> None:
        self.y.copy_(torch.sin(self.x) * 2 + 1)

    def check(self) -> None:
        torch.testing.assert_close(self.y.cpu(), torch.sin(self.x.cpu()) * 2 + 1)


# ---------------------------------------------------------------- eager


def test_eager_region_calls_the_function_each_time() -> None:
    work, graphs = Work(), GraphService("eager", CPU)
    region = graphs.capture("encode", work.run, key=3)
    assert work.runs == 0
    for _ in range(3):
        work.x.add_(1)
        region()
        work.check()
    assert work.runs == 3
    stats = graphs.stats()
    assert (stats["captures"], stats["replays"], stats["fallbacks"]) == (0, 3, 0)
    assert stats["regions"][0]["name"] == "encode"
    assert stats["regions"][0]["mode"] == "eager"


def test_stats_may_be_read_while_another_thread_runs_regions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, graphs = Work(), GraphService("eager", CPU)
    regions = [graphs.capture(name, work.run) for name in ("encode", "solve")]
    runner = threading.Thread(target=regions[0])
    report = Region.report

    def slow_report(region: Region) -> object:
        if not runner.ident:
            runner.start()
            runner.join(0.2)  # it waits for the reader, or it would reorder what is being read
        return report(region)

    monkeypatch.setattr(Region, "report", slow_report)
    assert len(graphs.stats()["regions"]) == 2
    runner.join()
    assert work.runs == 1


def test_regions_run_without_grad() -> None:
    seen: list[bool] = []
    GraphService("eager", CPU).capture("r", lambda: seen.append(torch.is_grad_enabled()))()
    assert seen == [False]


@pytest.mark.parametrize(("backend", "static"), [("eager", False), ("inductor", True)])
def test_static_shapes(backend: str, static: bool) -> None:
    assert GraphService(backend, CPU).static_shapes is static  # type: ignore[arg-type]


def test_cuda_wants_static_shapes_and_a_cuda_device() -> None:
    assert GraphService("cuda", "cuda:0").static_shapes
    with pytest.raises(ConfigError, match="needs a CUDA device; got 'cpu'"):
        GraphService("cuda", CPU)


@pytest.mark.parametrize(("backend", "limit"), [("metal", 4), ("eager", 0)])
def test_service_refuses_bad_settings(backend: str, limit: int) -> None:
    with pytest.raises(ConfigError):
        GraphService(backend, CPU, limit)  # type: ignore[arg-type]


def test_same_region_while_the_function_is_the_same() -> None:
    work, graphs = Work(), GraphService("eager", CPU)
    region = graphs.capture("a", work.run, 1)
    assert graphs.capture("a", work.run, 1) is region
    assert graphs.capture("a", work.run, 2) is not region
    other = Work()
    moved = graphs.capture("a", other.run, 1)
    assert moved is not region
    moved()
    assert (work.runs, other.runs) == (0, 1)
    assert len(graphs.report()) == 2


def test_least_recently_used_regions_are_dropped_and_come_back() -> None:
    work, graphs = Work(), GraphService("eager", CPU, limit=2)
    regions = [graphs.capture("r", work.run, key) for key in range(2)]
    regions[0]()
    regions.append(graphs.capture("r", work.run, 2))
    assert [row.key for row in graphs.report()] == ["0", "2"]
    regions[1]()
    assert [row.key for row in graphs.report()] == ["2", "1"]
    assert graphs.stats()["replays"] == 2


def test_release_by_name() -> None:
    work, graphs = Work(), GraphService("eager", CPU)
    for name in ("cache1/encode", "cache1/solve", "cache10/encode", "cache1"):
        graphs.capture(name, work.run)
    assert graphs.release("cache1") == 3
    assert [row.name for row in graphs.report()] == ["cache10/encode"]
    assert graphs.release("cache1") == 0


def test_closed_service_refuses() -> None:
    graphs = GraphService("eager", CPU)
    region = graphs.capture("a", Work().run)
    graphs.close()
    graphs.close()
    with pytest.raises(CudaGraphError, match="after close"):
        region()
    with pytest.raises(CudaGraphError, match="after close"):
        graphs.capture("a", Work().run)


def test_unsafe_part_makes_the_region_eager(caplog: pytest.LogCaptureFixture) -> None:
    work, graphs = Work(), GraphService("inductor", CPU)
    with caplog.at_level(logging.WARNING, "phyai"):
        region = graphs.capture("solve", work.run, 1, unsafe="StepCache")
        region()
        region()
        graphs.capture("solve", work.run, 1, unsafe="StepCache")
    assert work.runs == 2
    assert [r.getMessage() for r in caplog.records] == [
        "region solve runs eagerly: part StepCache is not capture-safe"
    ]
    assert graphs.stats()["fallbacks"] == 0


# ---------------------------------------------------------------- inductor


def fake_compile(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., object]
) -> list[dict[str, object]]:
    calls: list[dict[str, object]] = []

    def compile(fn: object, **options: object) -> object:
        calls.append(options)
        return build(fn)

    monkeypatch.setattr(torch, "compile", compile)
    return calls


def test_compiles_lazily_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_compile(monkeypatch, lambda fn: fn)
    work, graphs = Work(), GraphService("inductor", CPU)
    region = graphs.capture("encode", work.run, 1)
    assert calls == []
    region()
    region()
    work.check()
    assert len(calls) == 1
    assert calls[0]["backend"] == "inductor"
    assert calls[0]["dynamic"] is False
    stats = graphs.stats()
    assert (stats["captures"], stats["replays"], stats["fallbacks"]) == (1, 2, 0)
    assert stats["regions"][0]["compile_s"] > 0


def test_failed_compile_falls_back_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fn: object) -> object:
        def run() -> None:
            raise RuntimeError("lowering broke\nlong dump")

        return run

    calls = fake_compile(monkeypatch, fail)
    work, graphs = Work(), GraphService("inductor", CPU)
    with caplog.at_level(logging.WARNING, "phyai"):
        region = graphs.capture("encode", work.run, 1)
        region()
        work.check()
        region()
    assert len(calls) == 1
    assert work.runs == 2
    assert [r.getMessage() for r in caplog.records] == [
        "region encode runs eagerly: inductor failed: RuntimeError: lowering broke"
    ]
    stats = graphs.stats()
    assert (stats["captures"], stats["replays"], stats["fallbacks"]) == (0, 2, 1)
    assert stats["regions"][0]["mode"] == "eager"


def test_missing_compiler_is_said_once_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(fn: object) -> object:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    calls = fake_compile(monkeypatch, fail)
    graphs, works = GraphService("inductor", CPU), [Work(), Work()]
    with caplog.at_level(logging.WARNING, "phyai"):
        for index, work in enumerate(works):
            graphs.capture(f"r{index}", work.run)()
            work.check()
    assert len(calls) == 1
    assert len(caplog.records) == 1
    assert "r0 and all others" in caplog.text
    assert graphs.stats()["fallbacks"] == 2


def test_errors_of_the_function_are_not_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compile(monkeypatch, lambda fn: fn)
    graphs = GraphService("inductor", CPU)

    def broken() -> None:
        raise ZeroDivisionError("mine")

    region = graphs.capture("encode", broken)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="mine"):
            region()
    assert graphs.stats()["fallbacks"] == 0


def test_errors_after_the_first_run_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compile(monkeypatch, lambda fn: fn)
    state = {"bad": False, "runs": 0}

    def sometimes() -> None:
        state["runs"] += 1
        if state["bad"]:
            raise RuntimeError("later")

    region = GraphService("inductor", CPU).capture("r", sometimes)
    region()
    state["bad"] = True
    with pytest.raises(RuntimeError, match="later"):
        region()
    assert state["runs"] == 2


def test_released_region_compiles_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_compile(monkeypatch, lambda fn: fn)
    work, graphs = Work(), GraphService("inductor", CPU, limit=1)
    first, second = graphs.capture("r", work.run, 1), graphs.capture("r", work.run, 2)
    first()
    second()
    first()
    work.check()
    assert len(calls) == 3


def test_python_that_cannot_be_traced_falls_back_whole() -> None:
    """Half of the region must not have run when the tracer gives up."""
    total, graphs = torch.zeros(1), GraphService("inductor", CPU)

    def untraceable() -> None:
        total.add_(1)
        torch._dynamo.graph_break()
        total.add_(1)

    region = graphs.capture("solve", untraceable)
    region()
    assert total.item() == 2
    region()
    assert total.item() == 4
    assert graphs.stats()["fallbacks"] == 1
    assert graphs.report()[0].name == "solve"


@pytest.mark.slow
def test_compiled_regions_match_eager_for_more_keys_than_the_tracer_allows_per_function() -> None:
    graphs = GraphService("inductor", CPU)
    works = [Work(size) for size in range(3, 12)]
    regions = [graphs.capture("r", work.pure, index) for index, work in enumerate(works)]
    for _ in range(2):
        for work, region in zip(works, regions, strict=True):
            work.x.add_(1)
            region()
            work.check()
    assert graphs.stats()["captures"] + graphs.stats()["fallbacks"] == len(works)
    assert graphs.stats()["fallbacks"] in (0, len(works))  # all, on a machine without compiler


# ---------------------------------------------------------------- on a GPU


@needs_cuda
@pytest.mark.gpu
def test_gpu_graph_replays_with_stable_outputs() -> None:
    runs: list[bool] = []

    def fn(x: Tensor, y: Tensor) -> Tensor:
        runs.append(capturing())
        return x @ y

    x, y = torch.randn(8, 8, device="cuda"), torch.randn(8, 8, device="cuda")
    graph = CudaGraph()
    graph.capture(fn, {"x": x, "y": y})
    assert runs == [False, False, False, True]
    out = graph.replay()
    torch.testing.assert_close(out, x @ y)
    address = out.data_ptr()
    again = graph.replay({"x": y})
    assert again.data_ptr() == address
    torch.testing.assert_close(again, y @ y)
    assert len(runs) == 4


@needs_cuda
@pytest.mark.gpu
def test_gpu_regions_share_a_pool_and_match_eager() -> None:
    graphs = GraphService("cuda", "cuda:0", limit=2)
    works = [Work(size, "cuda") for size in (5, 64, 1000)]
    regions = [graphs.capture("r", work.run, index) for index, work in enumerate(works)]
    for _ in range(3):
        for work, region in zip(works, regions, strict=True):
            work.x.add_(1)
            region()
            work.check()
    assert graphs.stats()["fallbacks"] == 0
    assert len(graphs.report()) == 2


@needs_cuda
@pytest.mark.gpu
def test_gpu_capture_of_a_sync_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    work, graphs = Work(4, "cuda"), GraphService("cuda", "cuda:0")

    def syncs() -> None:
        if work.x.sum().item() >= 0:
            work.run()

    region = graphs.capture("solve", syncs)
    region()
    region()
    work.check()
    assert graphs.stats()["fallbacks"] == 1
    assert "region solve runs eagerly: cuda failed" in caplog.text


@needs_cuda
@pytest.mark.gpu
def test_gpu_capture_on_a_given_stream() -> None:
    graph = CudaGraph()
    with capture_on_stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        graph.capture(lambda x: x * 2, {"x": torch.ones(4, device="cuda")})
    assert graph.replay().tolist() == [2, 2, 2, 2]
