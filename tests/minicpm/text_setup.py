"""Decoders of the tests: sizes, random weights, the golden files of the text part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.models.minicpm_robot.config import FULL, LINEAR, TextSizes
from phyai.models.minicpm_robot.network.text import HybridDecoder
from phyai.models.minicpm_robot.ops import kernel_rows
from phyai.timers import Profile

GOLDEN = Path(__file__).parents[1] / "golden" / "minicpm"
NAME = "vlm.llm.model"
IMAGE = 310

SMALL = TextSizes(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=24,
    linear_conv_kernel_dim=3,
    linear_key_head_dim=12,
    linear_value_head_dim=20,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=(LINEAR, FULL, LINEAR, LINEAR),
    partial_rotary_factor=0.5,
    mrope_section=(2, 2, 2),
)
"""Sizes unlike those of the golden files: grouped heads, another kernel, another order."""


def table() -> KernelTable:
    made = KernelTable()
    made.add(kernel_rows())
    return made


def place(dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(table(), torch.device("cpu"), dtype)


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the claimed parameters of a module."""
    for param in module.parameters():
        attributes: Any = param
        for key, shard in attributes.hf_keys:
            tensor = tensors[key]
            assert tuple(tensor.shape) == attributes.weight_loader.shape(param, shard), key
            attributes.weight_loader.copy(param, tensor, shard)


def drawn(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return random checkpoint tensors for what a module claims."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for param in module.parameters():
        attributes: Any = param
        for key, shard in attributes.hf_keys:
            shape = attributes.weight_loader.shape(param, shard)
            scale = 0.3 if len(shape) == 1 or "conv1d" in key else shape[-1] ** -0.5
            scale = 1.0 if "embed" in key else scale
            found[key] = torch.randn(shape, generator=generator) * scale
            if key.endswith("A_log"):
                found[key] = torch.log(torch.rand(shape, generator=generator) * 4 + 0.05)
    return found


def decoder(
    config: TextSizes = SMALL, dtype: torch.dtype = torch.float32, seed: int = 0
) -> HybridDecoder:
    """Return a decoder with random weights, the same for a seed in every precision."""
    made = HybridDecoder(NAME, config, place(dtype), Profile())
    fill(made, drawn(made, seed))
    return made


def golden_decoder() -> HybridDecoder:
    made = HybridDecoder(NAME, golden_sizes(), place(), Profile())
    fill(made, load_file(GOLDEN / "model.safetensors"))
    return made


def golden_sizes() -> TextSizes:
    given = json.loads((GOLDEN / "config.json").read_text())["text_config"]
    rope = given["rope_parameters"]
    known = {name: given[name] for name in TextSizes.__slots__ if name in given}
    known |= {"layer_types": tuple(given["layer_types"]), "rope_theta": rope["rope_theta"]}
    known |= {"partial_rotary_factor": rope["partial_rotary_factor"]}
    return TextSizes(**{**known, "mrope_section": tuple(rope["mrope_section"])})


def case(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def close(got: Tensor, want: Tensor, atol: float) -> None:
    torch.testing.assert_close(got, want, rtol=0.0, atol=atol)


def ids(*lengths: int, images: int = 0) -> list[Tensor]:
    """Return rows of token ids; the first row begins with ``images`` image tokens."""
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [torch.randint(0, 50, (n,), generator=generator) for n in lengths]
    rows[0][:images] = IMAGE
    return rows
