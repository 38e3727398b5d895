"""Checkpoint loading: what is loaded, and that every defect is found before the first copy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phyai.errors import (
    CheckpointError,
    CheckpointNotFound,
    MissingTensors,
    PluginContractError,
    ShapeMismatch,
    UnexpectedTensors,
    WeightUpdateError,
)
from phyai.weights import (
    DuplicateClaimError,
    Region,
    TensorInfo,
    claim,
    fused,
    load_pretrained,
    open_source,
    randomize,
    replicated,
    run_post_load,
    save_safetensors,
    save_sharded,
    sharded,
    tensor_index,
    update_tensors,
)

EMBED = ("embed_tokens.weight", "lm_head.weight")


class Attention(nn.Module):
    """Fused QKV of sizes 4, 2, 2, an output projection and an optional scale."""

    def __init__(self, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        names = [f"{prefix}.{leg}_proj.weight" for leg in "qkv"]
        self.qkv = claim(
            nn.Parameter(torch.zeros(8, 4, dtype=dtype)), *names, loader=fused((4, 2, 2))
        )
        self.out = claim(nn.Parameter(torch.zeros(4, 4, dtype=dtype)), f"{prefix}.o_proj.weight")
        self.scale = claim(
            nn.Parameter(torch.ones(4, dtype=dtype)), f"{prefix}.scale", optional=True
        )


class Model(nn.Module):
    """An embedding with a second choice of key, and two attention layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = claim(nn.Parameter(torch.zeros(6, 4, dtype=dtype)), EMBED)
        self.layers = nn.ModuleList(Attention(f"layers.{i}", dtype) for i in range(2))


def make_tensors(seed: int = 0, *, embed: str = "embed_tokens.weight") -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {embed: (6, 4)}
    for i in range(2):
        for leg, rows in {"q": 4, "k": 2, "v": 2, "o": 4}.items():
            shapes[f"layers.{i}.{leg}_proj.weight"] = (rows, 4)
        shapes[f"layers.{i}.scale"] = (4,)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    return save_safetensors(tensors, folder / "model.safetensors")


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def refuses(model: nn.Module, source: Any, error: type[Exception], match: str, **kw: Any) -> str:
    """Assert that loading fails and leaves every parameter alone; return the message."""
    before = snapshot(model)
    with pytest.raises(error, match=match) as caught:
        load_pretrained(model, source, **kw)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return str(caught.value)


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


# ---------------------------------------------------------------- files that are broken


def corrupt(folder: Path, kind: str) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    if kind == "data cut":
        data = data[:-40]
    elif kind == "header cut":
        data = data[: length // 2]
    elif kind == "empty":
        data = bytearray()
    elif kind == "trailing":
        data += b"more"
    elif kind == "huge header":
        data[:8] = struct.pack("<Q", 2**62)
    elif kind == "no json":
        data[8 : 8 + length] = b"x" * length
    elif kind == "json list":
        data[8 : 8 + length] = b"[]".ljust(length)
    else:
        header = json.loads(data[8 : 8 + length])
        if kind == "shape lies":
            header["embed_tokens.weight"]["shape"] = [6, 40]
        elif kind == "overlap":
            entries = [e for k, e in header.items() if k.startswith("layers.0.o")]
            entries[0]["data_offsets"] = [0, 64]
        elif kind == "negative":
            header["embed_tokens.weight"]["shape"] = [-6, -4]
        elif kind == "dtype":
            header["embed_tokens.weight"]["dtype"] = "F31"
        elif kind == "no offsets":
            del header["embed_tokens.weight"]["data_offsets"]
        text = json.dumps(header).encode()
        data = bytearray(struct.pack("<Q", len(text)) + text + data[8 + length :])
    file.write_bytes(data)


@pytest.mark.parametrize(
    "kind",
    [
        "data cut",
        "header cut",
        "empty",
        "trailing",
        "huge header",
        "no json",
        "json list",
        "shape lies",
        "overlap",
        "negative",
        "dtype",
        "no offsets",
    ],
)
def test_corrupt_file(tmp_path: Path, kind: str) -> None:
    write(tmp_path, make_tensors())
    corrupt(tmp_path, kind)
    text = refuses(Model(), tmp_path, CheckpointError, r"model\.safetensors")
    assert ("truncated" in text) == (kind in ("data cut", "header cut", "empty", "huge header"))


def test_flipped_name_bytes_are_found(tmp_path: Path) -> None:
    file = write(tmp_path, make_tensors())
    file.write_bytes(file.read_bytes().replace(b"layers.0.scale", b"layers.1.scale"))
    refuses(Model(), tmp_path, CheckpointError, "twice")


def edit_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def test_absent_shard(tmp_path: Path) -> None:
    save_sharded(make_tensors(), tmp_path, max_bytes=200)
    gone = sorted(tmp_path.glob("model-*"))[1]
    gone.unlink()
    refuses(Model(), tmp_path, CheckpointError, gone.name)


def test_truncated_shard(tmp_path: Path) -> None:
    save_sharded(make_tensors(), tmp_path, max_bytes=200)
    last = sorted(tmp_path.glob("model-*"))[-1]
    last.write_bytes(last.read_bytes()[:-8])
    refuses(Model(), tmp_path, CheckpointError, f"{last.name}.*truncated")


@pytest.mark.parametrize("kind", ["unlisted", "absent", "elsewhere"])
def test_index_that_disagrees(tmp_path: Path, kind: str) -> None:
    save_sharded(make_tensors(), tmp_path, max_bytes=200)

    def change(weight_map: dict[str, str]) -> None:
        if kind == "unlisted":
            del weight_map["layers.0.scale"]
        elif kind == "absent":
            weight_map["layers.9.scale"] = weight_map["layers.0.scale"]
        else:
            weight_map["layers.0.scale"] = weight_map["layers.1.scale"]

    edit_index(tmp_path, change)
    name = "layers.9.scale" if kind == "absent" else "layers.0.scale"
    refuses(Model(), tmp_path, CheckpointError, rf"index.*{name}")


@pytest.mark.parametrize("where", ["../x.safetensors", "/etc/x.safetensors", "a\\b", "..", "", 3])
def test_index_that_leaves_its_folder(tmp_path: Path, where: Any) -> None:
    folder = tmp_path / "inner"
    save_sharded(make_tensors(), folder, max_bytes=200)
    save_safetensors({"layers.0.scale": torch.ones(4)}, tmp_path / "x.safetensors")
    edit_index(folder, lambda weight_map: weight_map.update({"layers.0.scale": where}))
    refuses(Model(), folder, CheckpointError, "beside it")


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    refuses(Model(), tmp_path, CheckpointError, "index.json")


def test_same_name_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_safetensors(make_tensors(), tmp_path / f"{name}.safetensors")
    refuses(Model(), tmp_path, CheckpointError, "in one file")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "last.ckpt", "w.pth"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    bomb = tmp_path / name
    bomb.write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/boom'\ntR.")
    for source in (tmp_path, bomb):
        refuses(Model(), source, CheckpointError, "convert it")
    assert not (tmp_path / "boom").exists()


def test_absent_sources(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "no", str(tmp_path / "*.safetensors"), [], "./nowhere"):
        refuses(Model(), source, CheckpointNotFound, "must")
    (tmp_path / "params").mkdir()
    refuses(Model(), tmp_path, CheckpointNotFound, "JAX")


# ---------------------------------------------------------------- other sources


def test_tensor_index(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in make_tensors().items()}
    save_sharded(tensors, tmp_path, max_bytes=100)
    index = tensor_index(tmp_path)
    assert set(index) == set(tensors)
    info = index["embed_tokens.weight"]
    assert (info.dtype, info.shape, info.nbytes) == ("BF16", (6, 4), 48)
    assert Path(info.file).parent == tmp_path


class Constants:
    """A TensorSource that computes its tensors."""

    label = "constants"

    def infos(self) -> dict[str, TensorInfo]:
        return {"weight": TensorInfo("F32", (2, 2), "")}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        return torch.full((2, 2), 7.0)


def test_any_tensor_source_loads() -> None:
    model = nn.Linear(2, 2, bias=False)
    report = load_pretrained(model, Constants())
    assert torch.equal(model.weight, torch.full((2, 2), 7.0))
    assert report.source == "constants"


def test_unaligned_data(tmp_path: Path) -> None:
    body = b"\x01" + torch.tensor([1.5, 2.5]).numpy().tobytes()
    header = json.dumps({
        "flag": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "weight": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }).encode()  # fmt: skip
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + body)
    assert open_source(file).read("weight").tolist() == [1.5, 2.5]


def test_pages_of_a_read_tensor_are_given_back(tmp_path: Path) -> None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs Linux")
    size = 8 * 2**20
    write(tmp_path, {name: torch.ones(size // 4) for name in "abcd"})
    source = open_source(tmp_path)

    def resident() -> int:
        lines = iter(smaps.read_text().splitlines())
        return sum(
            int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024
            for line in lines
            if str(tmp_path) in line
        )

    for name in "abcd":
        assert source.read(name).sum().item() == size / 4
        assert resident() < 1.5 * size


def test_saving_is_whole_or_nothing(tmp_path: Path) -> None:
    file = save_safetensors({"a": torch.ones(2)}, tmp_path / "m.safetensors", {"made": "here"})
    before = file.read_bytes()
    assert b'"made":"here"' in before
    shared = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        save_safetensors({"a": shared, "b": shared}, file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


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
    ],
)
def test_bad_update_of_a_mapping_changes_nothing(
    loaded: Model, name: str, value: Any, match: str
) -> None:
    before = snapshot(loaded)
    with pytest.raises(WeightUpdateError, match=match):
        update_tensors(loaded, {"embed_tokens.weight": torch.ones(6, 4), name: value})
    assert all(torch.equal(value, before[key]) for key, value in loaded.state_dict().items())


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
