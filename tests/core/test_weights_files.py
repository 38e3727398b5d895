"""Files of a checkpoint: every form, and every defect found before the first copy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.weights import (
    FiniteSource,
    Region,
    TensorInfo,
    claim,
    load_pretrained,
    mapped,
    open_source,
    save_safetensors,
    save_sharded,
    tensor_index,
    update_tensors,
)
from tests.core.weights_model import Model, make_tensors, refuses, write

# ---------------------------------------------------------------- values that are broken


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_finite_source_refuses_what_is_not(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    # The largest values add up to infinity, and are fine.
    largest = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    broken = torch.ones(64, dtype=dtype)
    broken[17] = value
    tensors = {"largest": largest, "broken": broken, "ids": torch.arange(3), "none": torch.ones(0)}
    file = save_safetensors(tensors, tmp_path / "model.safetensors")
    source = FiniteSource(open_source(file))
    for name in ("largest", "ids", "none"):
        assert torch.equal(source.read(name), tensors[name])
    with pytest.raises(CheckpointError, match=r"tensor 'broken' .* must be finite"):
        source.read("broken")
    assert torch.isfinite(source.read("broken", Region(0, 0, 17))).all()  # what a rank reads
    scales = torch.full((64,), 2.0**127).to(torch.float8_e8m0fnu)  # whose sum is not finite
    file = save_safetensors({**tensors, "scales": scales}, tmp_path / "scales.safetensors")
    assert FiniteSource(open_source(file)).read("scales").dtype == torch.float8_e8m0fnu
    trusting = FiniteSource(open_source(file), ["broken"])
    assert trusting.read("broken").shape == (64,)
    assert trusting.label == open_source(file).label


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
        elif kind == "dtype no string":
            header["embed_tokens.weight"]["dtype"] = ["F32"]
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
        "dtype no string",
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


def test_a_mapped_table_stays_in_its_file(tmp_path: Path) -> None:
    def made(dtype: torch.dtype) -> nn.Module:
        model = nn.Module()
        model.table = claim(nn.Parameter(torch.empty(6, 4, dtype=dtype)), "t", loader=mapped)
        model.head = nn.Linear(4, 2, bias=False)
        return model

    values = {"t": torch.randn(6, 4), "head.weight": torch.randn(2, 4)}
    path = save_safetensors(values, tmp_path / "model.safetensors")
    before = path.read_bytes()

    model = made(torch.float32)
    own = model.table.data_ptr()
    load_pretrained(model, path)
    assert model.table.data_ptr() != own  # a view, nothing was copied
    assert torch.equal(model.table, values["t"])

    place = model.table.data_ptr()
    update_tensors(model, {"t": torch.ones(6, 4)})
    assert model.table.data_ptr() == place
    assert model.table.unique().tolist() == [1.0]
    assert path.read_bytes() == before

    cast = made(torch.bfloat16)
    load_pretrained(cast, path)
    assert torch.equal(cast.table, values["t"].bfloat16())


def test_a_mapped_table_is_copied_from_a_source_that_reuses_its_memory() -> None:
    class OneBuffer:
        label = "one buffer"

        def __init__(self) -> None:
            self.buffer = torch.empty(6, 4)

        def infos(self) -> dict[str, TensorInfo]:
            return {"a": TensorInfo("F32", (6, 4), "x"), "b": TensorInfo("F32", (6, 4), "x")}

        def read(self, name: str, region: Any = None) -> torch.Tensor:
            return self.buffer.fill_(ord(name))

    model = nn.Module()
    model.a = claim(nn.Parameter(torch.empty(6, 4)), "a", loader=mapped)
    model.b = claim(nn.Parameter(torch.empty(6, 4)), "b", loader=mapped)
    load_pretrained(model, OneBuffer())
    assert model.a.unique().tolist() == [float(ord("a"))]
