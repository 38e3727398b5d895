"""A small model with every kind of claim, its checkpoint, and the check of a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phyai.weights import claim, fused, load_pretrained, save_safetensors

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
