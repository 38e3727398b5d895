"""Weights that change in place: online updates and random values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phyai.errors import WeightUpdateError
from phyai.weights import claim, load_pretrained, randomize, sharded, update_tensors
from tests.core.weights_model import EMBED, Attention, Model, make_tensors, snapshot, write

# ---------------------------------------------------------------- updates in place


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


@pytest.fixture
def loaded(tmp_path: Path) -> Model:
    write(tmp_path, make_tensors())
    model = Model()
    load_pretrained(model, tmp_path)
    return model


@pytest.mark.parametrize("form", ["mapping", "iterable"])
def test_update_of_a_subset(loaded: Model, form: str) -> None:
    held, before = addresses(loaded), snapshot(loaded)
    items = {"layers.0.k_proj.weight": torch.full((2, 4), 9.0, dtype=torch.bfloat16)}
    names = update_tensors(loaded, items if form == "mapping" else iter(items.items()))
    assert names == ("layers.0.k_proj.weight",)
    assert addresses(loaded) == held
    expected = before["layers.0.qkv"].clone()
    expected[4:6] = 9
    assert torch.equal(loaded.layers[0].qkv, expected)
    assert torch.equal(loaded.layers[1].qkv, before["layers.1.qkv"])


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("layers.0.k_prj.weight", torch.ones(2, 4), "Did you mean 'layers.0.k_proj.weight'"),
        ("layers.0.k_proj.weight", torch.ones(4, 4), r"shape \[2, 4\]; got \[4, 4\]"),
        ("layers.0.k_proj.weight", torch.ones(2, 4, dtype=torch.int8), "castable"),
        ("layers.0.k_proj.weight", [[1.0] * 4] * 2, "must be a tensor"),
        ("layers.0.k_proj.weight", torch.ones(2, 4, device="meta"), "meta"),
        ("layers.0.k_proj.weight", torch.ones(2, 4).to_sparse(), "must be a dense tensor"),
        ("layers.0.k_proj.weight", torch.tensor([[math.nan, 1, 1, 1]] * 2), "must be finite"),
        ("layers.0.k_proj.weight", torch.tensor([[1, 1, 1, -math.inf]] * 2), "must be finite"),
    ],
)
def test_bad_update_of_a_mapping_changes_nothing(
    loaded: Model, name: str, value: Any, match: str
) -> None:
    before = snapshot(loaded)
    with pytest.raises(WeightUpdateError, match=match):
        update_tensors(loaded, {"embed_tokens.weight": torch.ones(6, 4), name: value})
    assert all(torch.equal(value, before[key]) for key, value in loaded.state_dict().items())


def test_an_update_with_nan_is_refused_before_its_tensor_is_touched(loaded: Model) -> None:
    before = snapshot(loaded)
    name = "layers.0.k_proj.weight"
    with pytest.raises(WeightUpdateError, match="must be finite; got NaN"):
        update_tensors(loaded, iter([(name, torch.full((2, 4), math.nan))]))
    assert torch.equal(loaded.layers[0].qkv, before["layers.0.qkv"])


def test_what_the_model_does_not_use_must_still_be_a_tensor(loaded: Model) -> None:
    with pytest.raises(WeightUpdateError, match="must be a tensor with data; got int"):
        update_tensors(loaded, {"value_head": 3}, remap=lambda key: None)  # type: ignore[dict-item]


def test_update_through_remap(loaded: Model) -> None:
    items = {"model.embed_tokens.weight": torch.ones(6, 4), "model.value_head": torch.ones(1)}

    def remap(key: str) -> str | None:
        return None if "value_head" in key else key.removeprefix("model.")

    assert update_tensors(loaded, items, remap=remap) == ("model.embed_tokens.weight",)
    assert torch.equal(loaded.embed, torch.ones(6, 4))
    with pytest.raises(WeightUpdateError, match="distinct"):
        update_tensors(loaded, {"a": torch.ones(1), "b": torch.ones(1)}, remap=lambda k: "embed")


def test_update_of_alternatives(tmp_path: Path, loaded: Model) -> None:
    first, second = torch.full((6, 4), 1.0), torch.full((6, 4), 2.0)
    embed, head = EMBED
    assert update_tensors(loaded, {head: second}) == ()  # it holds the first choice
    assert update_tensors(loaded, iter([(embed, first), (head, second)])) == (embed,)
    assert torch.equal(loaded.embed, first)
    write(tmp_path, make_tensors(embed=head))
    tied = Model()
    load_pretrained(tied, tmp_path)
    assert update_tensors(tied, {head: second}) == (head,)
    assert torch.equal(tied.embed, second)
    assert update_tensors(tied, iter([(head, second), (embed, first)])) == (head, embed)
    assert torch.equal(tied.embed, first)


def test_update_of_a_slice() -> None:
    model = nn.Module()
    model.w = claim(nn.Parameter(torch.zeros(2, 3)), "w", loader=sharded(0, 1, 2))
    whole = torch.arange(12.0).view(4, 3)
    update_tensors(model, {"w": whole})
    assert torch.equal(model.w, whole[2:])


# ---------------------------------------------------------------- random weights


def test_randomize_is_a_function_of_seed_and_name() -> None:
    one, two, other = Model(), Model(), Model()
    for model, seed in ((one, 1), (two, 1), (other, 2)):
        randomize(model, seed)
    state = one.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in two.state_dict().items())
    assert all(not torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert not torch.equal(one.layers[0].qkv, one.layers[1].qkv)
    single = nn.ModuleDict({"layers": nn.ModuleList([Attention("x", torch.float32)])})
    randomize(single, 1)
    assert torch.equal(single["layers"][0].qkv, one.layers[0].qkv)


def test_randomize_scale_dtype_and_address() -> None:
    model = nn.Linear(1024, 1536, dtype=torch.bfloat16)  # more than one chunk
    held = addresses(model)
    seen: list[tuple[int, int, str]] = []
    randomize(model, 3, progress=lambda *args: seen.append(args))
    assert addresses(model) == held
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.float().std().item() == pytest.approx(1 / 32, rel=0.02)
    assert model.bias.float().std().item() == pytest.approx(0.02, rel=0.1)
    half = model.weight.numel() // 2
    flat = model.weight.flatten()
    assert not torch.equal(flat[:half], flat[half:])
    assert flat[: 2**19].float().mul(flat[2**20 :].float()).mean().abs() < 1e-5  # chunks differ
    assert seen[-1][0] == seen[-1][1] == model.weight.nbytes + model.bias.nbytes


def test_randomize_scheme_layout_and_post_load() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 4).to(memory_format=torch.channels_last)
            self.codes = nn.Parameter(torch.ones(4, dtype=torch.int8), requires_grad=False)
            self.packed = torch.zeros(())

        def post_load(self) -> None:
            self.packed = self.conv.bias.sum()

    net = Net()
    randomize(net, 0, scheme=lambda name, p: (1.0, 0.0) if name == "conv.bias" else None)
    assert net.conv.bias.tolist() == [1.0] * 8
    assert net.packed.item() == 8
    assert net.conv.weight.std().item() == pytest.approx(48**-0.5, rel=0.2)
    assert net.codes.tolist() == [0] * 4
    plain = nn.Module()
    plain.conv = nn.Conv2d(3, 8, 4)
    randomize(plain, 0)
    assert torch.equal(plain.conv.weight, net.conv.weight)


def test_random_weights_stand_for_a_checkpoint_of_a_dtype() -> None:
    wide, stored = nn.Linear(64, 8), nn.Linear(64, 8)
    randomize(wide, 0)
    randomize(stored, 0, stored=torch.bfloat16)
    assert stored.weight.dtype == torch.float32
    assert torch.equal(stored.weight, wide.weight.bfloat16().float())
    assert not torch.equal(stored.weight, wide.weight)
