"""One request of Cosmos3, and what a side holds in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.base import GIB, Refused, Setup
from benchmarks.peers.cosmos.sizes import CosmosSizes, Kind
from safetensors.torch import load_file
from torch import Size, Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One request; rows are as long, nothing is padded.

    input_ids [B, n] and neg_input_ids [B, m] int64, the texts of the two branches; sampling [3]
    float32: guidance scale, flow shift and frames per second.

    A policy: image [B, H, W, 3] uint8, the first frame; noise [B, T, A] float32 of the actions and
    video_noise [B, C, F, h, w] float32; domain_id [B] int64. The result is the actions. The canvas
    is the image itself, or one of a tier [1] int64.
    A video: noise [B, C, F, h, w] float32; the result is its last latents, which are also decoded.
    """

    steps: int
    input_ids: Tensor
    neg_input_ids: Tensor
    sampling: Tensor
    noise: Tensor
    image: Tensor | None = None
    video_noise: Tensor | None = None
    domain_id: Tensor | None = None
    tier: Tensor | None = None

    @classmethod
    def from_file(cls, path: Path, steps: int) -> Batch:
        return cls(**load_file(path), steps=steps)

    @property
    def guidance(self) -> float:
        return float(self.sampling[0])

    @property
    def flow_shift(self) -> float:
        return float(self.sampling[1])

    @property
    def fps(self) -> float:
        return float(self.sampling[2])

    @property
    def latents(self) -> Tensor:
        """What the video starts from."""
        return self.noise if self.video_noise is None else self.video_noise

    @property
    def guided(self) -> bool:
        return self.guidance != 1.0

    @property
    def positions(self) -> int:
        """Text tokens of one row's branches."""
        return self.input_ids.shape[1] + self.guided * self.neg_input_ids.shape[1]

    @property
    def kind(self) -> Kind:
        return "video" if self.image is None else "policy"


def one_row(batch: Batch, name: str) -> Batch:
    """Return a batch of a single row.  Raises: Refused for more."""
    if len(batch.noise) != 1:
        raise Refused(
            f"peer {name!r} computes one row at a time, as its pipeline does; got "
            f"{len(batch.noise)}. Leave --rows out."
        )
    return batch


def expected_bytes(setup: Setup, kind: Kind) -> int:
    """Return the weights' size and a generous one of all temporaries and of the interpreter."""
    sizes = CosmosSizes.from_folder(setup.checkpoint, kind=kind)
    narrow = 4 if setup.dtype == "fp32" else 2
    weights: int = sum(
        Size(shape).numel() * (4 if ".time_embedder." in f".{name}" else narrow)
        for name, shape in sizes.tensors()
    )
    tokens: int = sizes.media_tokens(setup.cameras) + setup.tokens
    scores: int = sizes.transformer["num_attention_heads"] * tokens**2
    mlp: int = 3 * tokens * sizes.transformer["intermediate_size"]
    pixels: int = setup.cameras * 128 * 160
    # Four frames at half the size, a few copies of the widest level.
    clip: int = 8 * pixels * max(sizes.vae["base_dim"], sizes.vae["decoder_base_dim"])
    return weights + 4 * setup.rows * (scores + mlp + clip) + GIB
