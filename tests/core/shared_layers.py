"""A module of every tensor-parallel layer, its checkpoint, and ranks played one after another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from phyai.kernels import KernelTable
from phyai.layers import (
    ColumnLinear,
    Placement,
    QKVLinear,
    RowLinear,
    VocabParallelEmbedding,
)
from phyai.parallel import Group, HeadShards
from phyai.weights import LoadReport, load_pretrained, save_safetensors

WIDTH, HIDDEN, VOCAB, HEAD = 24, 64, 50, 8
HEADS, KV_HEADS = 8, 2


class Played(Group):
    """A rank whose partners come later: it keeps what it hands in, and gets it back."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("tp", tuple(range(size)), rank)
        self.parts: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.traffic.count(x.nbytes)
        self.parts.append(x.clone())
        return x


class Layers(nn.Module):
    """Embedding, QKV, output, gate-up and down layers, with biases."""

    def __init__(self, at: Placement, *, bias: bool = True, in_file: bool = False) -> None:
        super().__init__()
        shards = HeadShards.of(HEADS, KV_HEADS, at.tp.size, at.tp.rank)
        names = ["q", "k", "v"]
        self.embed = VocabParallelEmbedding(
            ("embed.weight", "head.weight"), VOCAB, WIDTH, at, in_file=in_file
        )
        self.qkv = QKVLinear(names, WIDTH, shards, HEAD, at, bias=bias)
        self.out = RowLinear("out", HEADS * HEAD, WIDTH, at, bias=bias)
        self.gate_up = ColumnLinear(
            ["gate", "up"], WIDTH, [HIDDEN] * 2, at, bias=bias, epilogue="gelu_tanh_mul"
        )
        self.down = RowLinear("down", HIDDEN, WIDTH, at, bias=bias)


def placement(
    rank: int = 0,
    size: int = 1,
    dtype: torch.dtype = torch.float32,
    kernels: KernelTable | None = None,
) -> Placement:
    group = Played(rank, size) if size > 1 else Group("tp")
    return Placement(kernels or KernelTable(), torch.device("cpu"), dtype, tp=group)


def tensors(seed: int = 0, *, bias: bool = True) -> dict[str, Tensor]:
    """Return the checkpoint of ``Layers``."""
    random = torch.Generator().manual_seed(seed)
    q, kv = HEADS * HEAD, KV_HEADS * HEAD
    sizes = {"q": (q, WIDTH), "k": (kv, WIDTH), "v": (kv, WIDTH), "out": (WIDTH, q)}
    sizes |= {"gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    found = {"head.weight": torch.randn(VOCAB, WIDTH, generator=random)}
    for name, shape in sizes.items():
        found[f"{name}.weight"] = torch.randn(shape, generator=random) / shape[1] ** 0.5
        if bias:
            found[f"{name}.bias"] = torch.randn(shape[0], generator=random)
    return found


def write(folder: Path, found: dict[str, Tensor]) -> Path:
    return save_safetensors(found, folder / "model.safetensors")


def loaded(at: Placement, file: Path, **how: bool) -> tuple[Layers, LoadReport]:
    layers = Layers(at, **how)
    return layers, load_pretrained(layers, file)


def summed(size: int, run: Callable[[Placement], Tensor]) -> Tensor:
    """Return the sum of what the ranks handed in last, when ``run`` is played on each."""
    total: Tensor | None = None
    for rank in range(size):
        at = placement(rank, size)
        run(at)
        part = at.tp.parts[-1]  # type: ignore[attr-defined]
        total = part if total is None else total + part
    assert total is not None
    return total
