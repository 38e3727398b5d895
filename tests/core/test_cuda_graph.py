"""The captured graph by itself: what it keeps, what it refuses, and its registry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from phyai.errors import CudaGraphError
from phyai.graph import (
    GRAPH_CAPTURING,
    CudaGraph,
    CudaGraphRegistry,
    capturing,
)

CPU = torch.device("cpu")


# ---------------------------------------------------------------- CudaGraph


def add(x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"sum": x + y}


def example(device: str = "cpu") -> dict[str, Tensor]:
    return {"x": torch.ones(2, device=device), "y": torch.zeros(2, device=device)}


def test_graph_on_cpu_calls_the_function() -> None:
    inputs, graph = example(), CudaGraph(device="cpu")
    graph.capture(add, inputs)
    inputs["x"].fill_(100)  # the graph owns copies
    out = graph.replay()
    assert out["sum"].tolist() == [1, 1]
    again = graph.replay({"y": torch.tensor([5.0, 6.0])})
    assert again["sum"] is out["sum"]
    assert out["sum"].tolist() == [6, 7]
    assert graph.replay({"x": torch.zeros(2)})["sum"].tolist() == [5, 6]


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t, [t * 2]), lambda t: None])
def test_graph_outputs_may_be_nested(wrap: Callable[[Tensor], object]) -> None:
    graph = CudaGraph(device="cpu")
    graph.capture(lambda x: wrap(x + 1), {"x": torch.zeros(1)})
    torch.testing.assert_close(graph.replay({"x": torch.ones(1)}), wrap(torch.full((1,), 2.0)))


def test_graph_misuse() -> None:
    graph = CudaGraph(device="cpu")
    with pytest.raises(CudaGraphError, match="captured before replay"):
        graph.replay()
    graph.capture(add, example())
    with pytest.raises(CudaGraphError, match="captured once"):
        graph.capture(add, example())
    with pytest.raises(CudaGraphError, match=r"'x' must be \[2\].*got \[3\]"):
        graph.replay({"x": torch.zeros(3)})
    with pytest.raises(CudaGraphError, match="float64"):
        graph.replay({"x": torch.zeros(2).double()})
    with pytest.raises(CudaGraphError, match="one of x, y; got 'z'"):
        graph.replay({"z": torch.zeros(2)})


def test_a_refused_replay_writes_nothing() -> None:
    graph = CudaGraph(device="cpu")
    graph.capture(add, example())
    with pytest.raises(CudaGraphError):
        graph.replay({"x": torch.full((2,), 9.0), "y": torch.zeros(3)})
    assert graph.replay()["sum"].tolist() == [1, 1]


def test_real_cuda_mode_refuses_cpu_tensors() -> None:
    graph = CudaGraph(device="cuda")
    with pytest.raises(CudaGraphError, match="'x' must live on cuda; got a tensor on cpu"):
        graph.capture(add, example())
    assert not graph.captured


def test_failed_capture_may_be_repeated() -> None:
    graph = CudaGraph(device="cpu")
    with pytest.raises(ZeroDivisionError):
        graph.capture(lambda x: 1 / 0, {"x": torch.zeros(1)})
    assert not capturing()
    graph.capture(lambda x: x, {"x": torch.zeros(1)})


def test_flag_is_set_only_while_recording() -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(capturing())
        return x

    graph = CudaGraph(device="cpu")
    graph.capture(look, {"x": torch.zeros(1)})
    graph.replay()
    assert seen == [True, False]
    assert GRAPH_CAPTURING.get() is False


def test_registry_takes_a_key_once() -> None:
    registry, graph = CudaGraphRegistry(), CudaGraph(device="cpu")
    with pytest.raises(CudaGraphError, match="captured before"):
        registry.register("k", graph)
    graph.capture(add, example())
    registry.register("k", graph)
    assert registry.get("k") is graph
    assert "k" in registry
    with pytest.raises(CudaGraphError, match="must be new; got 'k'"):
        registry.register("k", graph)
    registry.remove("k")
    assert registry.get("k") is None
    assert len(registry) == 0
