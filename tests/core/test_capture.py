"""The stand-in for CUDA graphs: what it refuses, and what its replays show."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import phyai.addresses
from phyai.addresses import MAX_DEPTH, addresses, moved, nbytes, tensors_of
from phyai.cuda_graph import PooledCapturer, capturing
from phyai.errors import CudaGraphError
from phyai.graph import GraphService
from phyai.memory import Arena
from phyai.testing.capture import RecordingCapturer


def service(**options: Any) -> GraphService:
    return GraphService("cuda", "cpu", capturer=RecordingCapturer(**options))


class Layer(nn.Module):
    """y = w * x + 1 over static buffers; counts its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.x, self.y = torch.ones(3), torch.zeros(3)
        self.runs = 0

    def run(self) -> None:
        self.runs += 1
        scaled = self.x * self.weight
        scaled += 1
        self.y[:2].copy_(scaled[:2])
        self.y[2:] = scaled[2:]


# ---------------------------------------------------------------- replay


def test_a_replay_runs_the_operators_and_no_python() -> None:
    layer, graphs = Layer(), service()
    region = graphs.capture("layer", layer.run, reads=layer)
    for value in (1.0, 5.0, -2.0):
        layer.x.fill_(value)
        region()
        assert layer.y.tolist() == [2 * value + 1] * 3
    assert layer.runs == 3  # two warm-ups and the record, none of the replays
    stats = graphs.stats()
    assert (stats["captures"], stats["replays"], stats["fallbacks"]) == (1, 3, 0)
    assert stats["nbytes"] == 3 * 4  # ``scaled``
    (row,) = graphs.report()
    assert (row.mode, row.captures, row.nbytes) == ("cuda", 1, 12)


def test_what_a_region_updates_is_put_back_between_the_runs_of_a_capture() -> None:
    total, step, seen = torch.zeros(2), torch.ones(2), []

    def run() -> None:
        seen.append(total[0].clone())
        total.add_(step)

    for capturer in (RecordingCapturer(num_warmup_iters=3), PooledCapturer("cpu")):
        total.fill_(10.0)
        graphs = GraphService("cuda", "cpu", capturer=capturer)
        region = graphs.capture("count", run, updates=[total])
        seen.clear()
        region()
        assert total.tolist() == [11.0, 11.0]
        assert {float(value) for value in seen if not value.isnan()} == {10.0}
        region()
        assert total.tolist() == [12.0, 12.0]
        assert graphs.stats()["fallbacks"] == 0


def test_what_a_failed_capture_updated_is_put_back_before_it_runs_eagerly() -> None:
    total, graphs = torch.zeros(1), service()

    def run() -> None:
        total.add_(1.0)
        if float(total) > 99.0:  # waits for the device: cannot be captured
            total.zero_()

    region = graphs.capture("count", run, updates=[total])
    for count in (1.0, 2.0):
        region()
        assert total.tolist() == [count]
    assert graphs.stats()["fallbacks"] == 1


def test_a_python_branch_is_frozen() -> None:
    layer, graphs = Layer(), service()
    switch = {"on": True}

    def run() -> None:
        layer.y.fill_(1.0 if switch["on"] else 2.0)

    region = graphs.capture("branch", run)
    region()
    switch["on"] = False
    region()
    assert layer.y.tolist() == [1.0] * 3


def test_what_is_kept_of_a_capture_is_overwritten() -> None:
    layer, kept, graphs = Layer(), {}, service()

    def first() -> None:
        kept["product"] = layer.x * layer.weight

    def second() -> None:
        layer.y.copy_(kept["product"])

    graphs.capture("first", first)()
    assert kept["product"].isnan().all()
    graphs.capture("second", second)()
    assert layer.y.isnan().all()


def test_a_replay_reads_the_old_address() -> None:
    layer, graphs = Layer(), service()
    region = graphs.capture("layer", layer.run, reads=layer)
    region()
    layer.weight.data = torch.full((3,), 10.0)
    region()
    assert layer.y.tolist() == [3.0] * 3
    assert graphs.recapture_moved() == 1
    region()
    assert layer.y.tolist() == [11.0] * 3


# ---------------------------------------------------------------- recapture


def test_only_what_moved_is_captured_again(caplog: pytest.LogCaptureFixture) -> None:
    layers, graphs = [Layer(), Layer()], service()
    regions = [graphs.capture(f"r{i}", layer.run, reads=layer) for i, layer in enumerate(layers)]
    for region in regions:
        region()
    layers[0].weight.fill_(3.0)  # in place, as a weight update does
    assert graphs.recapture_moved() == 0
    regions[0]()
    assert layers[0].y.tolist() == [4.0] * 3
    layers[1].weight = nn.Parameter(torch.full((3,), 7.0), requires_grad=False)
    with caplog.at_level(logging.INFO, "phyai.graph"):
        assert graphs.recapture_moved() == 1
        assert graphs.recapture_moved() == 0
        for region in regions:
            region()
    assert layers[1].y.tolist() == [8.0] * 3
    assert [row.captures for row in graphs.report()] == [1, 2]
    stats = graphs.stats()
    assert (stats["captures"], stats["recaptures"]) == (3, 1)
    assert "region r1 is captured again: weight moved" in caplog.text
    assert "region r1 captured, 12 bytes, in" in caplog.text


def test_regions_that_replay_no_graph_have_nothing_to_recapture() -> None:
    layer = Layer()
    graphs = GraphService("eager", "cpu")
    graphs.capture("layer", layer.run, reads=layer)()
    layer.weight.data = torch.ones(3)
    assert graphs.recapture_moved() == 0
    graphs = service()
    graphs.capture("layer", layer.run, reads=layer)  # never called
    layer.weight.data = torch.ones(3)
    assert graphs.recapture_moved() == 0


class Packed:
    """A callable with a weight copy of its own."""

    def __init__(self) -> None:
        self.copies = {"a": (torch.zeros(1), [torch.zeros(2)])}


def test_addresses_of_everything_a_model_holds() -> None:
    layer, hidden = Layer(), torch.zeros(4)

    def closure() -> Tensor:
        return hidden

    layer.pack = Packed()
    layer.fn = closure
    root = {"m": layer, "again": layer}
    assert sorted(tensors_of(root)) == [
        "m.fn.hidden", "m.pack.copies.a.0", "m.pack.copies.a.1.0", "m.weight", "m.x", "m.y",
    ]  # fmt: skip
    before = addresses(root)
    assert moved(before, addresses(root)) == []
    layer.pack.copies["b"] = (torch.zeros(1), [])
    del layer.y
    assert moved(before, addresses(root)) == []  # new and vanished paths do not count
    layer.pack.copies["a"] = (torch.zeros(1), [torch.zeros(2)])
    assert moved(before, addresses(root)) == ["m.pack.copies.a.0", "m.pack.copies.a.1.0"]


def nested(value: object, steps: int) -> object:
    for _ in range(steps):
        value = [value]
    return value


def test_a_tensor_is_found_by_its_shortest_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a longer path, met first, meets its object at the limit."""
    monkeypatch.setattr(phyai.addresses, "_cuts", [])
    shared = Packed()
    root = {"long": nested(shared, MAX_DEPTH - 1), "short": [[shared]]}
    for order in (root, dict(reversed(root.items()))):
        assert sorted(tensors_of(order)) == ["short.0.0.copies.a.0", "short.0.0.copies.a.1.0"]
    assert caplog.records == []
    assert nbytes(root) == nbytes(shared) == 4 + 8
    for _ in range(2):
        assert tensors_of({"long": nested(shared, 10_000)}) == {}
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        f"objects more than {MAX_DEPTH} steps into a model are not looked into"
    ]


def test_dicts_may_grow_while_they_are_looked_through() -> None:
    layer, made = Layer(), {"table": torch.zeros(1)}

    class Meddling:
        """Stands for another thread: adds a tensor the moment it is looked at."""

        @property
        def __class__(self) -> type:
            for held in (made, layer._buffers):
                held[f"n{len(held)}"] = torch.zeros(1)
            return Meddling

    made["first"] = layer._buffers["first"] = Meddling()  # type: ignore[assignment]
    layer.made = made
    assert {"m.weight", "m.x", "m.made.table"} <= set(tensors_of({"m": layer}))


# ---------------------------------------------------------------- refusals

X = torch.ones(2)
HOST_WORK: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "branch": lambda x: 1 if (x > 0).all() else 2,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": np.asarray,
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "host data": lambda x: x + torch.tensor([1.0, 2.0]),
    "host array": lambda x: x + torch.from_numpy(np.ones(2, np.float32)),
    "random": torch.randn_like,
    "random in place": lambda x: x.normal_(),
    "kernel outside torch": lambda x: x.data_ptr(),
}


@pytest.mark.parametrize("work", HOST_WORK.values(), ids=HOST_WORK)
def test_host_work_is_refused(
    work: Callable[[Tensor], object], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CudaGraphError, match="must be free of host work"):
        RecordingCapturer().record(lambda: work(X))
    graphs = service()
    region = graphs.capture("solve", lambda: work(X))
    with caplog.at_level(logging.WARNING, "phyai.graph"):
        region()  # the engine goes on, eagerly, and says so
    assert (graphs.stats()["fallbacks"], graphs.report()[0].mode) == (1, "eager")
    assert "region solve runs eagerly: cuda failed: CudaGraphError" in caplog.text


def test_a_new_buffer_in_every_run_is_refused() -> None:
    arrays = iter([torch.ones(2) for _ in range(9)])
    with pytest.raises(CudaGraphError, match="must be the same in every run"):
        RecordingCapturer().record(lambda: next(arrays).add_(1))


def test_undeclared_memory_is_refused() -> None:
    layer, host = Layer(), torch.ones(3)
    declared = RecordingCapturer(static=lambda: tensors_of(layer).values())
    declared.record(layer.run)
    with pytest.raises(CudaGraphError, match=r"buffer of its cache .*got \[3\] torch.float32"):
        declared.record(lambda: layer.y.copy_(host))


def test_the_arena_does_not_grow_in_a_capture() -> None:
    arena, graphs = Arena("cpu"), service()
    made: list[bool] = []

    def run() -> None:
        if capturing():
            made.append(True)
            arena.allocate("late", (2,), torch.float32)

    region = graphs.capture("solve", run)
    region()
    assert made == [True]
    assert arena.nbytes == 0
    assert "buffers must be allocated before a graph records; got 'late'" in region.reason


def test_errors_of_the_function_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        service().capture("solve", lambda: 1 / 0)()


# ---------------------------------------------------------------- the real capturer, without a GPU


class FakeGraph:
    """A CudaGraph that remembers its pool."""

    made: list[FakeGraph]
    fail = False

    def __init__(self, num_warmup_iters: int, mempool: object, *, device: object) -> None:
        self.pool, self.nbytes, self.kept = mempool, 64, "nothing"
        self.made.append(self)

    def capture(self, fn: Callable[[], object], inputs: object) -> None:
        if FakeGraph.fail:
            raise RuntimeError("capture broke off")
        self.kept = fn()

    def replay(self) -> None: ...


def test_graphs_share_one_pool_until_a_capture_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraph.made, FakeGraph.fail = [], False
    pools = iter(("pool 1", "pool 2"))
    monkeypatch.setattr("phyai.cuda_graph.CudaGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    graphs = GraphService("cuda", "cuda:0")
    assert isinstance(graphs._capturer, PooledCapturer)
    regions = [graphs.capture(f"r{i}", lambda: X * 2) for i in range(3)]
    regions[0]()
    regions[1]()
    assert [graph.pool for graph in FakeGraph.made] == ["pool 1", "pool 1"]
    assert [graph.kept for graph in FakeGraph.made] == [None, None]
    assert graphs.stats()["nbytes"] == 128
    FakeGraph.fail = True
    regions[2]()
    FakeGraph.fail = False
    graphs.capture("r4", lambda: X * 2)()
    assert [graph.pool for graph in FakeGraph.made] == ["pool 1"] * 3 + ["pool 2"]
