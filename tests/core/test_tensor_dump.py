"""The tensor dump: names, filters, files, and an engine that writes one file per request."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phyai import Engine
from phyai.errors import ConfigError
from phyai.graph import GraphService
from phyai.tensor_dump import TensorDumper, load_pass
from tests.core.toy_adapter import STATE, ToyAdapter, ToyRequest, open_engine, registry
from tests.pi.tiny_requests import cpu_config, engine_of, random_request


class Pair(nn.Module):
    """A leaf that returns several tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x + 1, {"half": x / 2, "none": None}


class Net(nn.Module):
    """Calls one of its leaves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.pair = Pair()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.block(x))
        out: Tensor = self.pair(x)[0]
        return out


class DumpedAdapter(ToyAdapter):
    """A toy adapter that names its module."""

    name = "toy-dumped"

    def dump_targets(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    with registry():
        yield


def request(value: float) -> ToyRequest:
    return ToyRequest(torch.full((2, STATE), value))


def passes(folder: Path) -> list[dict[str, Tensor]]:
    return [load_pass(path) for path in sorted(folder.glob("rank0_pid*/pass*.pt"))]


def test_names_of_calls_and_parts(tmp_path: Path) -> None:
    net = Net()
    dumper = TensorDumper({"net": net, "alone": net.pair}, tmp_path)
    net(torch.ones(1, 2))  # outside a step: not kept
    x = torch.ones(1, 2)
    with dumper.step():
        out = net(x)
        x.fill_(9)
    (found,) = passes(tmp_path)
    assert sorted(found) == [
        "alone.0", "alone.1.half", "net.block.0", "net.block.0::call1", "net.block.1",
        "net.block.1::call1", "net.pair.0", "net.pair.1.half",
    ]  # fmt: skip
    assert torch.equal(found["net.pair.0"], out)
    assert torch.equal(found["net.block.0"], net.block[0](torch.ones(1, 2)))
    assert not any(tensor.requires_grad for tensor in found.values())
    dumper.close()
    with dumper.step():
        net(x)
    assert passes(tmp_path)[1] == {}


def test_an_error_still_writes_what_there_was(tmp_path: Path) -> None:
    net = Net()
    net.pair.forward = lambda x: 1 / 0  # type: ignore[method-assign]
    dumper = TensorDumper({"net": net}, tmp_path)
    with pytest.raises(ZeroDivisionError), dumper.step():
        net(torch.ones(1, 2))
    assert len(passes(tmp_path)[0]) == 4


# ---------------------------------------------------------------- engines


def test_an_engine_writes_one_file_per_request(tmp_path: Path) -> None:
    with open_engine(DumpedAdapter, runtime={"debug_tensor_dump_dir": str(tmp_path)}) as engine:
        results = [engine.step(request(value)) for value in (1.0, 2.0, 3.0)]
        with pytest.raises(Exception, match="state"):
            engine.step(ToyRequest(torch.full((2, STATE + 1), 1.0)))
        weight = engine.adapter.policy.linear.weight  # type: ignore[attr-defined]
        assert weight.device.type == "cpu"
    found = passes(tmp_path)
    assert [sorted(tensors) for tensors in found[:3]] == [["policy.linear"]] * 3
    for tensors, result in zip(found, results, strict=False):
        assert torch.equal(tensors["policy.linear"].view(result.shape), result)
    assert [path.name for path in sorted(tmp_path.glob("*/*.pt"))][:2] == [
        "pass00000.pt", "pass00001.pt",
    ]  # fmt: skip


FILTER = """
def some(name, module):
    return name.endswith("down") and hasattr(module, "weight")

def broken(name, module):
    return 1 / 0

number = 3
"""


def dumped(tmp_path: Path, **runtime: Any) -> list[dict[str, Tensor]]:
    """Return the passes of two requests through the tiny model."""
    settings = cpu_config(debug_tensor_dump_dir=str(tmp_path / "dump"), **runtime)
    with engine_of("pi05", settings) as engine:
        for seed in range(2):
            engine.step(random_request("pi05", [[True]], [5], num_steps=2, seed=seed))
    return passes(tmp_path / "dump")


def test_a_model_names_its_layers_and_steps(tmp_path: Path) -> None:
    first, second = dumped(tmp_path, debug_tensor_dump_filter=(r"^expert\.action_", r"norm1$"))
    assert sorted(first) == sorted(second)
    steps = ["", "::call1"]
    assert {f"expert.action_out{step}" for step in steps} <= set(first)
    assert not [name for name in first if "norm2" in name]
    assert first["expert.action_out"].shape == (1, 10, 8)
    assert not torch.equal(first["expert.action_out"], second["expert.action_out"])


@pytest.mark.parametrize("model", ["pi05", "pi0"])
def test_every_norm_is_in_the_dump(model: str, tmp_path: Path) -> None:
    with engine_of(model, cpu_config(debug_tensor_dump_dir=str(tmp_path))) as engine:
        engine.step(random_request(model, [[True, True]], [5], num_steps=2, seed=0))
        roots = engine.adapter.dump_targets()
    norms = {
        f"{root}.{name}": module
        for root, top in roots.items()
        for name, module in top.named_modules()
        if type(module).__name__ in ("RMSNorm", "LayerNorm", "ModulatedNorm")
    }
    (found,) = passes(tmp_path)
    last = len(roots["prefix"].layers) - 1  # type: ignore[arg-type]
    idle = {f"prefix.layers.{last}.norm2.norm", "prefix.norm.norm"}  # only K and V are wanted
    modules = {name.partition("::")[0] for name in found}
    written = {name for name in norms if modules & {name, f"{name}.1"}}
    assert len(norms) >= 12
    assert set(norms) - written == idle
    layer = "prefix.layers.0.norm2.norm"
    total, normed = found[f"{layer}.0"], found[f"{layer}.1"]
    torch.testing.assert_close(norms[layer](total), normed)


def test_filter_functions(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILTER)
    found = dumped(tmp_path, debug_tensor_dump_filter_fn=f"{file}:some")
    assert found[0]
    assert {name.partition("::")[0].rpartition(".")[2] for name in found[0]} == {"down"}
    for name, message in (
        ("broken", r"must take \(name, module\); got ZeroDivisionError for 'prefix"),
        ("number", "which is int"),
        ("missing", "has no attribute 'missing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            dumped(tmp_path, debug_tensor_dump_filter_fn=f"{file}:{name}")
    for place in (f"{tmp_path}/none.py:some", "no_such_package.mod:some"):
        with pytest.raises(ConfigError, match="must name a function that can be imported"):
            dumped(tmp_path, debug_tensor_dump_filter_fn=place)


# ---------------------------------------------------------------- refusals


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none of 3 passes the filter. Names look like: net\."):
        TensorDumper({"net": Net()}, tmp_path, lambda name, module: False)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"must be a folder that can be written; got '.*file'"):
        TensorDumper({"net": Net()}, file)
    with pytest.raises(ConfigError, match=r"names its modules in dump_targets\(\)"):
        open_engine(runtime={"debug_tensor_dump_dir": str(tmp_path)})


def test_a_file_that_cannot_be_written_later_does_not_fail_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dumper = TensorDumper({"net": nn.ReLU()}, tmp_path)
    (dumper.folder / "pass00000.pt").mkdir()
    with dumper.step():
        pass
    assert "pass00000.pt could not be written" in caplog.text


def test_nothing_but_tensors_is_read(tmp_path: Path) -> None:
    file, touched = tmp_path / "pass00000.pt", tmp_path / "touched"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (touched,))

    for write in (
        lambda: file.write_bytes(pickle.dumps(Evil(), protocol=2)),
        lambda: torch.save({"a": Evil()}, file),
        lambda: torch.save([torch.zeros(1)], file),
        lambda: file.write_bytes(b"no pickle at all"),
    ):
        write()
        with pytest.raises(ConfigError, match="must be a pass of a tensor dump"):
            load_pass(file)
    assert not touched.exists()
    with pytest.raises(FileNotFoundError):
        load_pass(tmp_path / "none.pt")


def test_graphs_are_left_out_while_dumping(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = {"debug_tensor_dump_dir": str(tmp_path), "graph_backend": "inductor"}
    with (
        caplog.at_level(logging.WARNING, "phyai"),
        open_engine(DumpedAdapter, runtime=runtime) as engine,
    ):
        graphs: GraphService = engine.core.services.graphs
        assert graphs.backend == "eager"
        engine.step(request(1.0))
    said = [r.getMessage() for r in caplog.records if "tensor dump" in r.getMessage()]
    assert said == ["graph back end inductor is left out: a tensor dump needs eager regions"]
    assert isinstance(engine, Engine)
    assert len(passes(tmp_path)) == 1
