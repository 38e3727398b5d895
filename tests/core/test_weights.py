"""Checkpoint loading: what is loaded, and that every misfit is found before the first copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from phyai.errors import (
    CheckpointError,
    MissingTensors,
    PluginContractError,
    ShapeMismatch,
    UnexpectedTensors,
)
from phyai.weights import (
    DuplicateClaimError,
    claim,
    fused,
    load_pretrained,
    replicated,
    run_post_load,
    save_safetensors,
    save_sharded,
    sharded,
)
from tests.core.weights_model import Model, make_tensors, refuses, write

# ---------------------------------------------------------------- what is loaded


def test_loads_and_fuses_single_file(tmp_path: Path) -> None:
    tensors = make_tensors()
    write(tmp_path, tensors)
    model = Model()
    seen: list[tuple[int, int, str]] = []
    report = load_pretrained(model, tmp_path, progress=lambda *args: seen.append(args))
    assert torch.equal(model.embed, tensors["embed_tokens.weight"])
    for i, layer in enumerate(model.layers):
        legs = [tensors[f"layers.{i}.{leg}_proj.weight"] for leg in "qkv"]
        assert torch.equal(layer.qkv, torch.cat(legs))
        assert torch.equal(layer.scale, tensors[f"layers.{i}.scale"])
    total = sum(t.nbytes for t in tensors.values())
    assert set(report.loaded) == set(tensors)
    assert report.missing == report.unexpected == report.optional_missing == ()
    assert (report.bytes_read, report.casts, report.source) == (total, {}, str(tmp_path))
    assert seen[-1][:2] == (total, total)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {name for _, _, name in seen} == set(tensors)
    assert "loaded 11 tensors" in str(report)


@pytest.mark.parametrize("form", ["folder", "file", "text", "list", "glob", "other name"])
def test_forms_of_a_source(tmp_path: Path, form: str) -> None:
    tensors = make_tensors()
    file = write(tmp_path, tensors)
    if form == "other name":
        file = file.rename(tmp_path / "policy.safetensors")
    source = {
        "file": file,
        "text": str(file),
        "list": [file],
        "glob": str(tmp_path / "*.safetensors"),
    }.get(form, tmp_path)
    model = Model()
    load_pretrained(model, source)
    assert torch.equal(model.embed, tensors["embed_tokens.weight"])


def test_sharded_equals_single(tmp_path: Path) -> None:
    tensors = make_tensors()
    index = save_sharded(tensors, tmp_path, max_bytes=150)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    assert json.loads(index.read_text())["metadata"]["total_size"] > 0
    model, single = Model(), Model()
    load_pretrained(model, tmp_path)
    save_safetensors(tensors, tmp_path / "one.safetensors")
    load_pretrained(single, tmp_path / "one.safetensors")
    for name, value in model.state_dict().items():
        assert torch.equal(value, single.state_dict()[name]), name
    shards = Model()
    load_pretrained(shards, sorted(tmp_path.glob("model-*.safetensors")))
    assert torch.equal(shards.embed, single.embed)


@pytest.mark.parametrize("held", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_alternative_keys(tmp_path: Path, held: tuple[str, ...]) -> None:
    tensors = make_tensors()
    first = tensors.pop("embed_tokens.weight")
    values = {"embed_tokens": first, "lm_head": first + 1}
    write(tmp_path, tensors | {f"{name}.weight": values[name] for name in held})
    model = Model()
    report = load_pretrained(model, tmp_path)
    assert torch.equal(model.embed, values[held[0]])
    assert report.ignored == (("lm_head.weight",) if len(held) == 2 else ())


def test_neither_alternative(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["embed_tokens.weight"]
    write(tmp_path, tensors)
    text = refuses(Model(), tmp_path, MissingTensors, "'embed_tokens.weight'")
    assert "(or 'lm_head.weight')" in text


def test_unclaimed_parameters_use_their_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    expected = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    write(tmp_path, expected)
    load_pretrained(model, tmp_path)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_tied_parameters_may_be_stored_under_either_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    write(tmp_path, {"b.weight": torch.full((2, 2), 3.0)})
    load_pretrained(model, tmp_path)
    assert torch.equal(model["a"].weight, torch.full((2, 2), 3.0))


def test_claim_without_keys_is_left_alone(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    claim(model.bias)
    model.bias.data.fill_(5)
    write(tmp_path, {"weight": torch.ones(2, 2)})
    load_pretrained(model, tmp_path)
    assert torch.equal(model.bias, torch.full((2,), 5.0))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_floating_casts(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    tensors = {name: t.to(stored) for name, t in make_tensors().items()}
    write(tmp_path, tensors)
    model = Model(wanted)
    report = load_pretrained(model, tmp_path)
    assert model.embed.dtype == wanted
    assert torch.equal(model.embed, tensors["embed_tokens.weight"].to(wanted))
    assert sum(report.casts.values()) == (0 if stored == wanted else len(tensors))
    if (stored, wanted) == (torch.float32, torch.bfloat16):
        assert report.casts == {"F32->BF16": 11}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float8_e4m3fn, torch.bool])
def test_other_casts_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = make_tensors()
    tensors["layers.0.o_proj.weight"] = torch.ones(4, 4).to(dtype)
    write(tmp_path, tensors)
    refuses(Model(), tmp_path, CheckpointError, r"'layers.0.o_proj.weight'.*F32 parameter")


def test_equal_unusual_dtypes_load(tmp_path: Path) -> None:
    model = nn.Module()
    model.q = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    model.f = nn.Parameter(torch.zeros(3, dtype=torch.float8_e4m3fn), requires_grad=False)
    model.e = nn.Parameter(torch.zeros(0, 3))
    model.s = nn.Parameter(torch.zeros(()))
    values = {
        "q": torch.tensor([1, -2, 3], dtype=torch.int8),
        "f": torch.tensor([1.0, -2.0, 3.0]).to(torch.float8_e4m3fn),
        "e": torch.zeros(0, 3),
        "s": torch.tensor(4.0),
    }
    write(tmp_path, values)
    load_pretrained(model, tmp_path)
    assert model.q.tolist() == [1, -2, 3]
    assert model.f.float().tolist() == [1, -2, 3]
    assert model.s.item() == 4


def test_post_load_runs_children_first(tmp_path: Path) -> None:
    order: list[str] = []

    class Node(nn.Module):
        def __init__(self, name: str, *children: nn.Module) -> None:
            super().__init__()
            self.name, self.parts = name, nn.ModuleList(children)
            self.weight = claim(nn.Parameter(torch.zeros(1)), name)

        def post_load(self) -> None:
            order.append(f"{self.name}={self.weight.item():.0f}")

    model = Node("top", Node("left", Node("leaf")), Node("right"))
    write(tmp_path, {name: torch.ones(1) for name in ("top", "left", "leaf", "right")})
    load_pretrained(model, tmp_path)
    assert order == ["leaf=1", "left=1", "right=1", "top=1"]
    run_post_load(model)
    assert len(order) == 8


# ---------------------------------------------------------------- slices


@pytest.mark.parametrize("rank", range(4))
def test_sharded_reads_its_slice_only(tmp_path: Path, rank: int) -> None:
    whole = torch.randn(8, 6)
    write(tmp_path, {name: whole.clone() for name in ("row", "column", "shared")})
    model = nn.Module()
    model.row = claim(nn.Parameter(torch.empty(2, 6)), "row", loader=sharded(0, rank, 4))
    model.column = claim(nn.Parameter(torch.empty(8, 3)), "column", loader=sharded(-1, rank, 4, 2))
    model.shared = claim(nn.Parameter(torch.empty(8, 6)), "shared", loader=sharded(0, rank, 4, 4))
    report = load_pretrained(model, tmp_path)
    assert torch.equal(model.row, whole[2 * rank : 2 * rank + 2])
    half = rank // 2
    assert torch.equal(model.column, whole[:, 3 * half : 3 * half + 3])
    assert torch.equal(model.shared, whole)
    assert report.bytes_read == whole.nbytes // 4 + whole.nbytes // 2 + whole.nbytes


def test_fused_and_sharded(tmp_path: Path) -> None:
    q, k = torch.randn(8, 3), torch.randn(2, 3)
    write(tmp_path, {"q": q, "k": k})
    for rank in range(4):
        model = nn.Module()
        loader = fused((2, 1), rank=rank, world=4, replicate=(1, 2))
        model.qk = claim(nn.Parameter(torch.empty(3, 3)), "q", "k", loader=loader)
        load_pretrained(model, tmp_path)
        part = rank // 2
        assert torch.equal(model.qk, torch.cat([q[2 * rank : 2 * rank + 2], k[part : part + 1]]))


def test_contract_of_claims() -> None:
    weight = nn.Parameter(torch.empty(6, 2))
    with pytest.raises(PluginContractError, match="add up"):
        claim(weight, "a", "b", loader=fused((4, 4)))
    with pytest.raises(PluginContractError, match="one key per leg"):
        claim(weight, "a", loader=fused((4, 2)))
    with pytest.raises(PluginContractError, match="one key"):
        claim(weight, "a", "b")
    with pytest.raises(PluginContractError, match="non-empty"):
        claim(weight, "")
    with pytest.raises(PluginContractError, match="rank"):
        sharded(0, 2, 2)
    with pytest.raises(PluginContractError, match="dim"):
        claim(weight, "a", loader=sharded(2, 0, 2))
    claimed: Any = claim(weight, "a", "b", loader=fused((4, 2)), optional=True)
    assert claimed is weight
    assert claimed.hf_keys == [("a", 0), ("b", 1)]
    assert claimed.optional is True
    single: Any = claim(nn.Parameter(torch.empty(1)), "c")
    assert (single.hf_keys, single.weight_loader) == ([("c", None)], replicated)


def test_duplicate_claims(tmp_path: Path) -> None:
    write(tmp_path, {"same": torch.ones(2)})
    model = nn.Module()
    model.a = claim(nn.Parameter(torch.zeros(2)), "same")
    model.b = claim(nn.Parameter(torch.zeros(2)), "same")
    refuses(model, tmp_path, RuntimeError, "'a' and 'b'")
    assert issubclass(DuplicateClaimError, PluginContractError)


def test_meta_parameters_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {"weight": torch.ones(2, 2)})
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    with pytest.raises(PluginContractError, match="meta"):
        load_pretrained(model, tmp_path)


# ---------------------------------------------------------------- names that do not fit


def test_dropped_key(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["layers.1.k_proj.weight"]
    write(tmp_path, tensors)
    refuses(Model(), tmp_path, MissingTensors, "1 missing: 'layers.1.k_proj.weight'")
    model = Model()
    report = load_pretrained(model, tmp_path, strict=False)
    assert report.missing == ("layers.1.k_proj.weight",)
    assert torch.equal(model.layers[1].qkv[:4], tensors["layers.1.q_proj.weight"])
    assert "missing: 1" in str(report)


def test_renamed_key_names_the_nearest(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["layers.1.k_project.weight"] = tensors.pop("layers.1.k_proj.weight")
    write(tmp_path, tensors)
    text = refuses(Model(), tmp_path, MissingTensors, "missing 1|1 missing")
    assert "'layers.1.k_proj.weight' (the file has 'layers.1.k_project.weight')" in text
    assert "1 unexpected" in text


def test_extra_key(tmp_path: Path) -> None:
    write(tmp_path, make_tensors() | {"layers.0.rotary.inv_freq": torch.ones(2)})
    refuses(Model(), tmp_path, UnexpectedTensors, "'layers.0.rotary.inv_freq'")
    report = load_pretrained(Model(), tmp_path, ignore=[r"\.inv_freq$"])
    assert report.ignored == ("layers.0.rotary.inv_freq",)
    report = load_pretrained(Model(), tmp_path, strict=False)
    assert report.unexpected == ("layers.0.rotary.inv_freq",)


def test_ignore_does_not_drop_claimed_tensors(tmp_path: Path) -> None:
    tensors = make_tensors()
    write(tmp_path, tensors)
    model = Model()
    load_pretrained(model, tmp_path, ignore=["embed"])
    assert torch.equal(model.embed, tensors["embed_tokens.weight"])


def test_long_lists_are_cut(tmp_path: Path) -> None:
    write(tmp_path, make_tensors() | {f"extra.{i:02d}": torch.ones(1) for i in range(30)})
    text = refuses(Model(), tmp_path, UnexpectedTensors, "30 unexpected")
    assert "and 22 more" in text
    assert "extra.09" not in text


def test_optional_missing(tmp_path: Path) -> None:
    tensors = make_tensors()
    del tensors["layers.0.scale"]
    write(tmp_path, tensors)
    model = Model()
    report = load_pretrained(model, tmp_path)
    assert report.optional_missing == ("layers.0.scale",)
    assert torch.equal(model.layers[0].scale, torch.ones(4))


def test_half_of_an_optional_parameter_is_missing(tmp_path: Path) -> None:
    model = nn.Module()
    model.w = claim(nn.Parameter(torch.zeros(2, 2)), "a", "b", loader=fused((1, 1)), optional=True)
    write(tmp_path, {"a": torch.ones(1, 2)})
    refuses(model, tmp_path, MissingTensors, "'b'")


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["layers.0.v_proj.weight"] = torch.randn(3, 4)
    tensors["embed_tokens.weight"] = torch.randn(4, 6)  # right size, wrong shape
    write(tmp_path, tensors)
    text = refuses(Model(), tmp_path, ShapeMismatch, "2 of another shape", strict=False)
    assert "'layers.0.v_proj.weight' [3, 4] instead of [2, 4]" in text
    assert "'embed_tokens.weight' [4, 6] instead of [6, 4]" in text


# ---------------------------------------------------------------- remap


@pytest.mark.parametrize(
    "remap",
    [{"model.": "", "attn_out": "o_proj"}, lambda k: k[6:].replace("attn_out", "o_proj")],
    ids=["dict", "callable"],
)
def test_remap(tmp_path: Path, remap: Any) -> None:
    tensors = make_tensors()
    renamed = {"model." + k.replace("o_proj", "attn_out"): t for k, t in tensors.items()}
    write(tmp_path, renamed)
    model = Model()
    report = load_pretrained(model, tmp_path, remap=remap)
    assert torch.equal(model.layers[1].out, tensors["layers.1.o_proj.weight"])
    assert set(report.loaded) == set(tensors)


def test_remap_drops(tmp_path: Path) -> None:
    write(tmp_path, make_tensors() | {"value_head.weight": torch.ones(1)})
    remap = {"value_head.weight": None}
    report = load_pretrained(Model(), tmp_path, remap=lambda k: remap.get(k, k))
    assert report.ignored == ("value_head.weight",)


def test_remap_that_merges_names(tmp_path: Path) -> None:
    write(tmp_path, make_tensors() | {"layers.0.attn.scale": torch.ones(4)})
    remap = {".attn": ""}
    refuses(Model(), tmp_path, CheckpointError, "'layers.0.attn.scale'", remap=remap)
