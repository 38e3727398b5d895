"""One request of pi0 or pi0.5, its padding, and what a side holds in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from benchmarks.peers.base import GIB, Dtype, Refused, Setup
from benchmarks.peers.pi.sizes import PiSizes
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True, slots=True)
class Batch:
    """One request.

    images [B, C, 3, S, S] float32 in [-1, 1]; image_masks [B, C] bool; tokens [B, n] int64 right
    padded; token_mask [B, n] bool; noise [B, T, A] float32; state [B, D] float32 (pi0).
    """

    images: Tensor
    image_masks: Tensor
    tokens: Tensor
    token_mask: Tensor
    noise: Tensor
    steps: int
    state: Tensor | None = None

    @classmethod
    def from_file(cls, path: Path, steps: int) -> Batch:
        return cls(**load_file(path), steps=steps)

    def padded(self, cameras: int, tokens: int) -> Batch:
        """Return the batch with masked black cameras and masked zero tokens up to these counts."""
        more, longer = cameras - self.images.shape[1], tokens - self.tokens.shape[1]
        if more < 0 or longer < 0:
            raise Refused(
                f"padding must not shrink a batch of {self.images.shape[1]} cameras and "
                f"{self.tokens.shape[1]} tokens; got {cameras} and {tokens}."
            )
        return replace(
            self,
            images=pad(self.images, (0,) * 6 + (0, more), value=-1.0),
            image_masks=pad(self.image_masks, (0, more), value=False),
            tokens=pad(self.tokens, (0, longer)),
            token_mask=pad(self.token_mask, (0, longer), value=False),
        )

    @property
    def unpadded(self) -> bool:
        """Whether every camera and token is valid."""
        return bool(self.image_masks.all()) and bool(self.token_mask.all())


def weight_bytes(sizes: PiSizes, dtype: Dtype, *, float32_vision: bool) -> int:
    """Return bytes of all parameters under the mixed-precision rules of ``hf_network``."""
    total = 0
    for name, shape in sizes.tensors():
        wide = dtype == "fp32" or "norm" in name or ("vision" in name and float32_vision)
        total += torch.Size(shape).numel() * (4 if wide else 2)
    return total


def activation_bytes(setup: Setup) -> int:
    """Return a generous size of the largest temporaries and of the interpreter with torch."""
    sizes, rows = PiSizes.from_folder(setup.checkpoint), setup.rows
    positions = sizes.positions(setup.cameras, setup.tokens)
    scores = 4 * sizes.text.num_attention_heads * positions**2
    mlp = 3 * positions * sizes.text.intermediate_size
    return 4 * rows * (scores + mlp) + 3 * GIB // 4
