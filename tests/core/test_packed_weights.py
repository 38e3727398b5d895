"""Weights in a kernel's own layout: packed when loaded, unpacked to be changed, never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from phyai.errors import PluginContractError, WeightUpdateError
from phyai.kernels import CATALOGUE, KernelTable, parse_policy
from phyai.layers import Linear, Placement, TableLinear
from phyai.weights import load_pretrained, randomize, unpacked, update_tensors

PACKING = [
    row.name
    for row in CATALOGUE
    if row.op == "linear" and row.pack is not None and "" in row.formats and "cpu" in row.devices
]
F32, BF16 = torch.float32, torch.bfloat16


def placement(row: str, dtype: torch.dtype = F32) -> Placement:
    table = KernelTable(force={"linear": row})
    choice = table.explain_one("linear", device="cpu", dtype=dtype, packed=True,
                               epilogue="gelu_tanh", rounding="free")  # fmt: skip
    if choice.row is None:
        pytest.skip(f"{row} does not run {dtype} here: {choice.refused}")
    return Placement(table, torch.device("cpu"), dtype, rounding="free")


def model(at: Placement) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "qkv": Linear(["q", "k", "v"], 24, [16, 8, 8], at, epilogue="gelu_tanh"),
            "mlp": Linear(["gate", "up"], 32, [20, 20], at, epilogue="gelu_tanh", bias=True),
        }
    )


def tensors(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    shapes = {"q": (16, 24), "k": (8, 24), "v": (8, 24), "gate": (20, 32), "up": (20, 32)}
    draw = torch.Generator().manual_seed(seed)
    found = {f"{n}.weight": torch.randn(s, generator=draw).to(dtype) for n, s in shapes.items()}
    for name in ("gate", "up"):
        found[f"{name}.bias"] = torch.randn(20, generator=draw).to(dtype)
    return found


def expected(held: dict[str, Tensor], x: Tensor, legs: str, bias: bool) -> Tensor:
    weight = torch.cat([held[f"{leg}.weight"] for leg in legs.split()]).float()
    added = torch.cat([held[f"{leg}.bias"] for leg in legs.split()]).float() if bias else None
    out = nn.functional.linear(x.float(), weight, added).to(x.dtype)
    return nn.functional.gelu(out, approximate="tanh")


def check(made: nn.ModuleDict, held: dict[str, Tensor], dtype: torch.dtype) -> None:
    x = torch.randn(5, 24).to(dtype)
    y = torch.randn(2, 3, 32).to(dtype)
    close: dict[str, Any] = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == F32 else {"atol": 0.05, "rtol": 0.02}
    )
    torch.testing.assert_close(made["qkv"](x), expected(held, x, "q k v", False), **close)
    torch.testing.assert_close(made["mlp"](y), expected(held, y, "gate up", True), **close)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("row", PACKING)
def test_loaded_then_packed_then_updated(row: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made, held = model(placement(row, dtype)), tensors(dtype)
    save_file(held, tmp_path / "model.safetensors")
    load_pretrained(made, tmp_path)
    assert all(layer.is_packed for layer in made.values())
    assert all(
        p.untyped_storage().nbytes() < 8 for n, p in made.named_parameters() if "weight" in n
    )
    check(made, held, dtype)
    # some legs of both layers, in an order that goes back and forth between them
    fresh = tensors(dtype, seed=1)
    names = ["k.weight", "up.weight", "q.weight", "up.bias"]
    assert update_tensors(made, [(n, fresh[n]) for n in names]) == tuple(names)
    assert all(layer.is_packed for layer in made.values())
    check(made, {**held, **{n: fresh[n] for n in names}}, dtype)
    # a whole second load replaces everything
    save_file(fresh, tmp_path / "model.safetensors")
    load_pretrained(made, tmp_path)
    check(made, fresh, dtype)


@pytest.mark.parametrize("row", PACKING)
def test_writing_to_a_packed_weight_fails_instead_of_getting_lost(row: str) -> None:
    made = model(placement(row))
    randomize(made, seed=0)
    layer = made["qkv"]
    before = layer(torch.ones(1, 24))
    assert layer.weight.shape == (32, 24)
    with pytest.raises(RuntimeError), torch.no_grad():
        layer.weight.copy_(torch.zeros(32, 24))
    assert torch.equal(layer(torch.ones(1, 24)), before)
    layer.unpack()
    with torch.no_grad():
        layer.weight.copy_(torch.zeros(32, 24))
    layer.pack()
    assert layer(torch.ones(1, 24)).abs().max() == 0


def test_each_weight_is_packed_before_the_next_is_read(tmp_path: Path) -> None:
    """There are never two copies of more than one layer."""
    made, held = model(placement("onednn.linear")), tensors(F32)
    save_file(held, tmp_path / "model.safetensors")
    legs = {"qkv": ("q", "k", "v"), "mlp": ("gate", "up")}
    read: set[str] = set()
    waiting: list[str] = []

    def watch(done: int, total: int, name: str) -> None:
        read.add(name)
        for kind, layer in made.items():
            complete = all(f"{leg}.weight" in read for leg in legs[kind])
            if complete is not layer.is_packed:
                waiting.append(f"{kind} after {name}")

    load_pretrained(made, tmp_path, progress=watch)
    assert read == set(held)
    assert waiting == []


@pytest.mark.parametrize("exact", [True, False])
def test_a_table_layer_is_halved_only_when_nothing_is_lost(exact: bool) -> None:
    layer = TableLinear("dense", 8, 24, Placement(KernelTable(), torch.device("cpu"), BF16))
    weight = torch.randn(24, 8)
    weight = weight.bfloat16().float() if exact else weight
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    x = torch.randn(3, 8)
    before = layer(x)
    layer.pack()
    assert (layer.weight.untyped_storage().nbytes() < 8) is exact
    assert torch.equal(layer(x), before)
    layer.unpack()
    assert torch.equal(layer.weight, weight)


class Derived(nn.Module):
    """Derives something from a weight after loading."""

    def __init__(self, at: Placement) -> None:
        super().__init__()
        self.inner = Linear("q", 24, 16, at)
        self.table = torch.zeros(16)

    def post_load(self) -> None:
        self.table = self.inner.weight.sum(dim=1)


def test_post_load_sees_the_weights(tmp_path: Path) -> None:
    held = {"q.weight": tensors(F32)["q.weight"]}
    save_file(held, tmp_path / "model.safetensors")
    made = nn.ModuleDict({"a": Derived(placement("onednn.linear"))})
    for load in (lambda: load_pretrained(made, tmp_path), lambda: randomize(made, seed=3)):
        load()
        inner = made["a"].inner
        assert inner.is_packed
        with unpacked(made):
            torch.testing.assert_close(made["a"].table, inner.weight.sum(dim=1))
        assert made["a"].table.abs().sum() > 1


def test_the_state_of_a_packed_model_is_refused_not_empty() -> None:
    made = model(placement("onednn.linear"))
    made["table"] = TableLinear("t", 8, 24, placement("onednn.linear"))
    randomize(made, seed=0)
    with pytest.raises(PluginContractError, match="state_dict needs the weights of Linear"):
        made.state_dict()
    with unpacked(made):
        state = made.state_dict()
    assert state["qkv.weight"].abs().sum() > 1
    assert made["qkv"].is_packed


def test_a_second_load_opens_one_layer_at_a_time(tmp_path: Path) -> None:
    made, held = model(placement("onednn.linear")), tensors(F32)
    save_file(held, tmp_path / "model.safetensors")
    load_pretrained(made, tmp_path)
    open_layers: list[int] = []
    load_pretrained(
        made,
        tmp_path,
        progress=lambda *_: open_layers.append(sum(not m.is_packed for m in made.values())),
    )
    # the biases come first in the file; the fused legs of a layer side by side
    assert max(open_layers) <= 2
    assert open_layers[-1] == 0


def quantised(weight: dict[str, object]) -> Placement:
    table = KernelTable()
    section = {"method": "rtn", "rules": [], "default": {"weight": weight, "input": None}}
    table.use(parse_policy({"schema": "v1", "quantization": section}))
    return Placement(table, torch.device("cpu"), F32)


@pytest.mark.parametrize("dtype", ["nvfp4", "int8", "mxfp4"])
def test_a_whole_update_gives_what_a_load_gives(dtype: str, tmp_path: Path) -> None:
    """Also for formats that round the legs of a fused layer together, in any order of the legs."""
    old, new = tensors(F32), tensors(F32, seed=1)
    new = {name: tensor * 5 for name, tensor in new.items()}
    for name, held in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        save_file(held, tmp_path / name / "model.safetensors")
    updated, loaded = model(quantised({"dtype": dtype})), model(quantised({"dtype": dtype}))
    load_pretrained(updated, tmp_path / "old")
    load_pretrained(loaded, tmp_path / "new")
    with pytest.raises(WeightUpdateError, match="must be finite"):
        update_tensors(updated, {"q.weight": new["q.weight"] * float("nan")})
    spoiled = {"q.weight": new["q.weight"] * 1e30}
    update_tensors(updated, spoiled)  # one bad update must not outlive the next good one
    order = ["k.weight", "up.weight", "q.weight", "gate.bias", "gate.weight", "v.weight", "up.bias"]
    update_tensors(updated, [(name, new[name]) for name in order])
    for kind, x in (("qkv", torch.randn(3, 24)), ("mlp", torch.randn(3, 32))):
        assert torch.equal(updated[kind](x), loaded[kind](x))
