"""One request of GR00T N1.7, and what a side holds in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.peers.base import GIB, Setup
from benchmarks.peers.groot.sizes import GrootSizes
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One request.

    pixel_values [patches, C T p p] float32, the images of a row together; image_grid_thw
    [images, 3] int64; input_ids and attention_mask [B, S] int64, left padded; state [B, history, D]
    float32; embodiment_id [B] int64; noise [B, T, A] float32.
    """

    pixel_values: Tensor
    image_grid_thw: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    state: Tensor
    embodiment_id: Tensor
    noise: Tensor
    steps: int

    @classmethod
    def from_file(cls, path: Path, steps: int) -> Batch:
        return cls(**load_file(path), steps=steps)

    @property
    def positions(self) -> int:
        """Valid positions of the longest row."""
        return int(self.attention_mask.sum(1).max())


def expected_bytes(setup: Setup) -> int:
    """Return the weights' size and a generous one of all temporaries and of the interpreter."""
    sizes = GrootSizes.from_folder(setup.checkpoint)
    width = 4 if setup.dtype == "fp32" else 2
    weights: int = sum(torch.Size(shape).numel() for _, shape in sizes.tensors()) * width
    positions: int = sizes.positions(setup.cameras, setup.tokens)
    patches: int = 4 * setup.cameras * sizes.image_tokens
    scores: int = 4 * sizes.text["num_attention_heads"] * positions**2
    mlp: int = 3 * (positions * sizes.text["intermediate_size"]
               + patches * sizes.vision["intermediate_size"])  # fmt: skip
    return weights + 4 * setup.rows * (scores + mlp) + GIB
