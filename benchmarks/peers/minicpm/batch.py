"""One request of MiniCPM-RobotManip, and what a side holds in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.base import GIB, Setup
from benchmarks.peers.minicpm.sizes import MiniCPMSizes
from safetensors.torch import load_file
from torch import Size, Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One request; all rows are as long, nothing is padded.

    pixel_values [1, C, p, p patches] float32, the images of a row together, patch after patch;
    target_sizes [images, 2] int32, patches along height and width; input_ids [B, S] int64; state
    [B, D] or [B, 1, D] float32; embodiment_id [B] int64; noise [B, T, A] float32.

    Golden cases leave parts out: with vl_embs [B, S, F] float32 in place of ids and images the head
    runs alone, without noise it does not run and the result is the last hidden state.
    """

    steps: int
    pixel_values: Tensor | None = None
    target_sizes: Tensor | None = None
    input_ids: Tensor | None = None
    vl_embs: Tensor | None = None
    state: Tensor | None = None
    embodiment_id: Tensor | None = None
    noise: Tensor | None = None

    @classmethod
    def from_file(cls, path: Path, steps: int) -> Batch:
        return cls(**load_file(path), steps=steps)

    @property
    def positions(self) -> int:
        """Length of every row."""
        sequence = self.vl_embs if self.input_ids is None else self.input_ids
        assert sequence is not None
        return sequence.shape[1]


def expected_bytes(setup: Setup) -> int:
    """Return the weights' size and a generous one of all temporaries and of the interpreter."""
    sizes = MiniCPMSizes.from_folder(setup.checkpoint)
    narrow = 4 if setup.dtype == "fp32" else 2
    weights: int = sum(
        Size(shape).numel() * (4 if name.startswith("action_head.") else narrow)
        for name, shape in sizes.tensors()
    )
    positions: int = sizes.positions(setup.cameras, setup.tokens)
    patches: int = setup.cameras * sizes.side**2
    scores: int = 4 * (
        sizes.text["num_attention_heads"] * positions**2
        + sizes.vision["num_attention_heads"] * sizes.side**4
    )
    mlp: int = 3 * (
        positions * sizes.text["intermediate_size"] + patches * sizes.vision["intermediate_size"]
    )
    return weights + 4 * setup.rows * (scores + mlp) + GIB
