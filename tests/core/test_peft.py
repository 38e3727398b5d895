"""LoRA adapters in PEFT's format: merging equals the sum by hand, everything odd is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phyai.errors import CheckpointError, CheckpointNotFound, ShapeMismatch, UnexpectedTensors
from phyai.weights import (
    AdapterConfig,
    PeftSource,
    claim,
    fused,
    load_pretrained,
    merge_peft,
    save_safetensors,
    sharded,
)

RANK, ALPHA = 2, 6.0


class Net(nn.Module):
    """embed -> two linears and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, dtype=dtype)
        self.up = nn.Linear(4, 6, dtype=dtype)
        self.down = nn.Linear(6, 4, bias=False, dtype=dtype)
        self.head = nn.Linear(4, 3, dtype=dtype)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def base_tensors(prefix: str = "", dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    state = Net().state_dict()
    return {
        prefix + k: rand(*v.shape, seed=i, dtype=dtype) for i, (k, v) in enumerate(state.items())
    }


def write_base(folder: Path, **kwargs: Any) -> dict[str, Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = base_tensors(**kwargs)
    save_safetensors(tensors, folder / "model.safetensors")
    return tensors


def lora(module: str, out: int, into: int, rank: int = RANK, seed: int = 50) -> dict[str, Tensor]:
    return {
        f"base_model.model.{module}.lora_A.weight": rand(rank, into, seed=seed),
        f"base_model.model.{module}.lora_B.weight": rand(out, rank, seed=seed + 1),
    }


def write_adapter(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_safetensors(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def product(tensors: dict[str, Tensor], module: str) -> Tensor:
    key = f"base_model.model.{module}"
    return tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]


def test_merge_equals_manual_merge(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    tensors = lora("up", 6, 4) | lora("down", 4, 6, seed=60)
    adapter = write_adapter(
        tmp_path / "adapter", tensors, base_model_name_or_path=str(tmp_path / "base")
    )
    model = Net()
    report = load_pretrained(model, adapter)
    scale = ALPHA / RANK
    torch.testing.assert_close(
        model.up.weight.data, base["up.weight"] + scale * product(tensors, "up")
    )
    torch.testing.assert_close(
        model.down.weight.data, base["down.weight"] + scale * product(tensors, "down")
    )
    assert torch.equal(model.head.weight, base["head.weight"])
    assert not torch.equal(model.up.weight, base["up.weight"])
    assert "adapter" in report.source


def test_scaling_variants(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    tensors = lora("up", 6, 4, rank=4) | lora("down", 4, 6, seed=60)
    adapter = write_adapter(
        tmp_path / "a",
        tensors,
        use_rslora=True,
        rank_pattern={"up": 4},
        alpha_pattern={"down": 10.0},
    )
    source = merge_peft(adapter, tmp_path / "base")
    up, down = source.read("up.weight").clone(), source.read("down.weight").clone()
    torch.testing.assert_close(
        up, base["up.weight"] + ALPHA / math.sqrt(4) * product(tensors, "up")
    )
    torch.testing.assert_close(
        down, base["down.weight"] + 10 / math.sqrt(RANK) * product(tensors, "down")
    )
    assert sorted(source.merged) == ["down.weight", "up.weight"]


def test_patterns_match_whole_path_parts(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", lora("up", 6, 4), rank_pattern={"p": 4})
    assert merge_peft(adapter, tmp_path / "base").merged == ("up.weight",)


def test_merge_is_float32_before_the_cast(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    tensors = {k: v * 1e-3 for k, v in lora("up", 6, 4).items()}
    adapter = write_adapter(tmp_path / "a", tensors)
    model = Net()
    load_pretrained(model, merge_peft(adapter, tmp_path / "base"))
    expected = base["up.weight"].float() + ALPHA / RANK * product(tensors, "up")
    torch.testing.assert_close(model.up.weight.data, expected)
    half = Net(torch.bfloat16)
    report = load_pretrained(half, merge_peft(adapter, tmp_path / "base"))
    assert torch.equal(half.up.weight, expected.bfloat16())
    assert report.casts == {"F32->BF16": 1}


def test_full_copies_and_names_with_adapter_label(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    tensors = {k.replace(".weight", ".default.weight"): v for k, v in lora("up", 6, 4).items()} | {
        "base_model.model.head.modules_to_save.default.weight": rand(3, 4, seed=70),
        "base_model.model.head.original_module.weight": rand(3, 4, seed=72),
        "base_model.model.head.bias": rand(3, seed=71),
    }
    model = Net()
    load_pretrained(model, merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base"))
    assert torch.equal(model.head.weight, rand(3, 4, seed=70))
    assert torch.equal(model.head.bias, rand(3, seed=71))
    assert not torch.equal(model.up.weight, base["up.weight"])
    assert torch.equal(model.up.bias, base["up.bias"])


def test_embedding_lora(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    key = "base_model.model.embed.lora_embedding_"
    tensors = {key + "A": rand(RANK, 7), key + "B": rand(4, RANK)}
    source = merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base")
    delta = (tensors[key + "B"] @ tensors[key + "A"]).T
    torch.testing.assert_close(
        source.read("embed.weight"), base["embed.weight"] + ALPHA / RANK * delta
    )


def test_base_beside_the_adapter(tmp_path: Path) -> None:
    base = write_base(tmp_path)
    tensors = lora("up", 6, 4)
    write_adapter(tmp_path, tensors, base_model_name_or_path="/nowhere/else")
    model = Net()
    load_pretrained(model, tmp_path)
    expected = base["up.weight"] + ALPHA / RANK * product(tensors, "up")
    torch.testing.assert_close(model.up.weight.data, expected)


@pytest.mark.parametrize("remap", [lambda k: k.removeprefix("model."), {"model.": ""}])
def test_adapter_and_base_with_different_prefixes(tmp_path: Path, remap: Any) -> None:
    base = write_base(tmp_path / "base")
    tensors = lora("model.up", 6, 4)
    adapter = write_adapter(tmp_path / "a", tensors, base_model_name_or_path=str(tmp_path / "base"))
    model = Net()
    load_pretrained(model, adapter, remap=remap)
    expected = base["up.weight"] + ALPHA / RANK * product(tensors, "model.up")
    torch.testing.assert_close(model.up.weight.data, expected)


class Sliced(nn.Module):
    """Rank 1 of 2: the rows of up, the columns of down."""

    def __init__(self) -> None:
        super().__init__()
        rows, columns = torch.empty(3, 4), torch.empty(4, 3)
        self.up = claim(nn.Parameter(rows), "up.weight", loader=sharded(0, 1, 2))
        self.down = claim(nn.Parameter(columns), "down.weight", loader=sharded(1, 1, 2))


def test_merge_of_a_slice(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    tensors = lora("up", 6, 4) | lora("down", 4, 6, seed=60)
    model = Sliced()
    source = merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base")
    load_pretrained(model, source, ignore=("embed", "head", "bias"))
    scale = ALPHA / RANK
    up = base["up.weight"] + scale * product(tensors, "up")
    down = base["down.weight"] + scale * product(tensors, "down")
    torch.testing.assert_close(model.up.data, up[3:])
    torch.testing.assert_close(model.down.data, down[:, 3:])


def test_merge_into_a_fused_parameter(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    tensors = lora("head", 3, 4)
    model = nn.Module()
    model.both = claim(
        nn.Parameter(torch.empty(9, 4)), "up.weight", "head.weight", loader=fused((6, 3))
    )
    source = merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base")
    load_pretrained(model, source, strict=False)
    head = base["head.weight"] + ALPHA / RANK * product(tensors, "head")
    torch.testing.assert_close(model.both.data, torch.cat([base["up.weight"], head]))


def test_unmatched_lora_names_the_nearest(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", lora("uq", 6, 4))
    with pytest.raises(UnexpectedTensors, match=r"uq\.lora_A\.weight' \(the base has 'up\.weight"):
        merge_peft(adapter, tmp_path / "base")


def test_half_a_pair_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    tensors = lora("up", 6, 4)
    del tensors["base_model.model.up.lora_B.weight"]
    with pytest.raises(UnexpectedTensors, match="lora_A"):
        merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base")


def test_full_copy_of_an_unknown_module_is_unexpected(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    tensors = lora("up", 6, 4) | {"base_model.model.nohead.weight": rand(3, 4)}
    source = merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base")
    with pytest.raises(UnexpectedTensors, match="nohead"):
        load_pretrained(Net(), source)


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        (lora("up", 5, 4), {}),
        (lora("up", 6, 4, rank=3), {}),
        ({"base_model.model.head.weight": rand(2, 2)}, {}),
    ],
    ids=["out", "rank", "full copy"],
)
def test_wrong_shapes(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    write_base(tmp_path / "base")
    with pytest.raises(ShapeMismatch, match=r"up\.weight|head\.weight"):
        merge_peft(write_adapter(tmp_path / "a", tensors, **config), tmp_path / "base")


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"peft_type": None},
        {"use_dora": True},
        {"fan_in_fan_out": True},
        {"init_lora_weights": "pissa"},
        {"r": "many"},
        {"r": 0},
        {"rank_pattern": {"(": 4}},
        {"rank_pattern": {"up": 0}},
    ],
    ids=str,
)
def test_other_kinds_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", lora("up", 6, 4), **config)
    with pytest.raises(CheckpointError, match="adapter"):
        merge_peft(adapter, tmp_path / "base")


def test_dora_tensors_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    tensors = lora("up", 6, 4) | {"base_model.model.up.lora_magnitude_vector": rand(6)}
    with pytest.raises(CheckpointError, match="DoRA"):
        merge_peft(write_adapter(tmp_path / "a", tensors), tmp_path / "base")


def test_base_that_cannot_be_found(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", lora("up", 6, 4))
    with pytest.raises(CheckpointError, match="base_model_name_or_path"):
        merge_peft(adapter)
    adapter = write_adapter(tmp_path / "b", lora("up", 6, 4), base_model_name_or_path="./gone")
    with pytest.raises(CheckpointNotFound, match=r"gone.*base="):
        load_pretrained(Net(), adapter)


def test_base_that_is_an_adapter_itself(tmp_path: Path) -> None:
    where = str(tmp_path / "a")
    adapter = write_adapter(tmp_path / "a", lora("up", 6, 4), base_model_name_or_path=where)
    with pytest.raises(CheckpointError, match="full weights"):
        load_pretrained(Net(), adapter)


def test_pickled_adapter_is_not_opened(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    adapter = write_adapter(tmp_path / "a", lora("up", 6, 4))
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointNotFound, match="safetensors"):
        merge_peft(adapter, tmp_path / "base")


def test_source_of_another_kind_can_be_the_base(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    first = merge_peft(write_adapter(tmp_path / "a", lora("up", 6, 4)), tmp_path / "base")
    adapter = write_adapter(tmp_path / "b", lora("up", 6, 4, seed=90))
    both = PeftSource(first, adapter)
    change = both.read("up.weight").clone() - first.read("up.weight")
    torch.testing.assert_close(change, ALPHA / RANK * product(lora("up", 6, 4, seed=90), "up"))


def test_config_that_overwhelms_the_reader(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="valid adapter config"):
        AdapterConfig.read(tmp_path)
