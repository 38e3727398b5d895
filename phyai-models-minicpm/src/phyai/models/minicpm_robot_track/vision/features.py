"""Frames in, vision tokens out: both towers and the pooling of their grids."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phyai.errors import ConfigError, RequestError
from phyai.layers import Placement, VisionTower
from phyai.models.minicpm_robot_track.vision.dinov3 import DinoTower
from phyai.models.minicpm_robot_track.vision.pixels import scaled
from phyai.models.minicpm_robot_track.vision.pooling import (
    COARSE_TOKENS,
    FINE_TOKENS,
    GridPool,
    Record,
)
from phyai.models.minicpm_robot_track.vision.sizes import TowerSizes
from phyai.timers import Profile

DINO, SIGLIP = "dino", "siglip"
SIGLIP_VISION = f"{SIGLIP}.vision_model"


class VisionTowers(nn.Module):
    """Frames of raw RGB values -> coarse and fine tokens, DINOv3's features before SigLIP's.

    Tensors are claimed under the official names of each tower, below ``dino`` and ``siglip``;
    SigLIP's last hidden state is taken after its last norm, its pooling head is not computed.
    The towers run in the placement's dtype; pixels, patch projections and pooling are float32.

    >>> from phyai.kernels import KernelTable
    >>> from phyai.layers import VisionConfig
    >>> from phyai.models.minicpm_robot_track.vision import DinoConfig
    >>> sizes = TowerSizes(DinoConfig(16, 1, 2, 32), VisionConfig(24, 1, 2, 32, 14, 112))
    >>> towers = VisionTowers(sizes, Placement(KernelTable(), torch.device("cpu"), torch.float32))
    >>> [part.shape for part in towers(torch.zeros(2, 3, 112, 112, dtype=torch.uint8))]
    [torch.Size([2, 4, 40]), torch.Size([2, 64, 40])]
    """

    dino_table: Tensor
    siglip_table: Tensor

    def __init__(
        self,
        sizes: TowerSizes,
        at: Placement,
        profile: Profile | None = None,
        *,
        coarse_tokens: int = COARSE_TOKENS,
        fine_tokens: int = FINE_TOKENS,
    ) -> None:
        super().__init__()
        for label, config in (("DINOv3", sizes.dino), ("SigLIP", sizes.siglip)):
            if config.num_channels != 3:
                raise ConfigError(
                    f"{label} num_channels must be 3 (RGB); got {config.num_channels}. "
                    "Correct its config.json."
                )
        self.sizes, self.profile = sizes, profile if profile is not None else Profile()
        self.dino = DinoTower(DINO, sizes.dino, sizes.image_size, at)
        self.siglip = VisionTower(SIGLIP_VISION, sizes.siglip, at)
        self.pool = GridPool(
            self.dino.num_patches,
            sizes.siglip.num_patches,
            coarse_tokens=coarse_tokens,
            fine_tokens=fine_tokens,
            device=at.device,
        )
        for name, pixels in ((DINO, sizes.dino_pixels), (SIGLIP, sizes.siglip_pixels)):
            self.register_buffer(f"{name}_table", pixels.table(at.device), persistent=False)

    def forward(self, frames: Tensor, record: Record | None = None) -> tuple[Tensor, Tensor]:
        """Return coarse [F, coarse_tokens, C] and fine [F, fine_tokens, C], float32.

        frames: [F, 3, S, S] uint8, or float32 of the same values 0..255; S is ``image_size``.
        record: gets ``dino_tokens``, ``siglip_tokens``, ``siglip_resized``, ``coarse``, ``fine``.
        Raises: RequestError for frames of another shape or dtype.
        """
        self._check(frames)
        self.profile.count("tower_frames", frames.shape[0])
        values = frames.float()
        dino = self.dino(scaled(values, self.dino_table))
        siglip = self.siglip(scaled(values, self.siglip_table))
        coarse, fine = self.pool(dino, siglip, record)
        if record is not None:
            made = {"dino_tokens": dino, "siglip_tokens": siglip, "coarse": coarse, "fine": fine}
            for name, tensor in made.items():
                record(name, tensor)
        return coarse, fine

    def _check(self, frames: Tensor) -> None:
        side = self.sizes.image_size
        shape, dtype = tuple(frames.shape), frames.dtype
        fits = len(shape) == 4 and shape[0] > 0 and shape[1:] == (3, side, side)
        if not fits or dtype not in (torch.uint8, torch.float32):
            raise RequestError(
                f"frames must be uint8 or float32 [frames, 3, {side}, {side}]; got {dtype} "
                f"{list(shape)}. Resize them first."
            )
