"""What a vision tower must know about the patches of a batch: index lists and tables. Host only."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.backbones.qwen3_vl.config import Qwen3VLVisionConfig
from phyai.backbones.qwen3_vl.positions import Grid
from phyai.errors import CapacityError, RequestError

ROPE_THETA = 1e4


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """Tensors and sizes of one batch of patches.

    N patches, packed: those of the first frame of the first image first. I frames, each of which
    attends within itself; P the longest frame.

    pos_index int64 [N, 4], pos_weight float32 [N, 4]: entries of the position table, their weights.
    cos, sin float32 [N, head_dim]: rotation of the patch.
    slots int64 [N]: place in the padded [I * P]; padding patches have I * P.
    key_mask bool [I, P]: the places that are taken.
    patches: how many patches, the first ones, are the batch's own; the rest is padding.
    dense: patch n stands at place n, and every frame in use is P long: nothing is moved or masked.
    """

    pos_index: Tensor
    pos_weight: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    key_mask: Tensor
    patches: int
    dense: bool

    @property
    def frames(self) -> int:
        return self.key_mask.shape[0]

    @property
    def longest(self) -> int:
        return self.key_mask.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, for buffers that graphs read."""
        names = ("pos_index", "pos_weight", "cos", "sin", "slots", "key_mask")
        return {name: getattr(self, name) for name in names}

    def on(self, tensors: Mapping[str, Tensor]) -> VisionLayout:
        """Return the layout with other tensors of the same shapes, such as those of a device."""
        changed: dict[str, Any] = dict(tensors)
        return replace(self, **changed)

    def to(self, device: torch.device) -> VisionLayout:
        return self.on({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def padded(self, patches: int, frames: int, longest: int) -> VisionLayout:
        """Return the layout at the sizes of a bucket: N, I and P.

        Raises: CapacityError when the batch does not fit.
        """
        if self.patches > patches or self.frames > frames or self.longest > longest:
            raise CapacityError(
                f"images must fit the bucket of {patches} patches, {frames} frames and {longest} "
                f"patches per frame; got {self.patches}, {self.frames} and {self.longest}. "
                "Use a larger bucket."
            )
        more = patches - self.patches
        frame, place = self.slots // max(self.longest, 1), self.slots % max(self.longest, 1)
        mask = functional.pad(
            self.key_mask, (0, longest - self.longest, 0, frames - self.frames), value=False
        )
        dense = self.dense and longest == self.longest and patches == frames * longest
        slots = _lengthened(frame * longest + place, more, frames * longest)
        return VisionLayout(
            pos_index=_lengthened(self.pos_index, more, 0),
            pos_weight=_lengthened(self.pos_weight, more, 0),
            cos=_lengthened(self.cos, more, 1),
            sin=_lengthened(self.sin, more, 0),
            slots=slots,
            key_mask=mask,
            patches=self.patches,
            dense=dense,
        )


def _lengthened(x: Tensor, more: int, fill: float) -> Tensor:
    return torch.cat([x, x.new_full((more, *x.shape[1:]), fill)]) if more else x


def vision_layout(grids: Sequence[Grid], config: Qwen3VLVisionConfig) -> VisionLayout:
    """Return the layout of images with these grids, in order; none is fine.

    Raises: RequestError for a grid that is empty or cannot be merged.

    >>> from phyai.backbones.qwen3_vl import Qwen3VLVisionConfig, vision_layout
    >>> config = Qwen3VLVisionConfig(2, 32, 4, 48, 64, 64, (0,))
    >>> layout = vision_layout([(1, 4, 4), (1, 2, 4)], config)
    >>> layout.patches, layout.longest, layout.dense
    (24, 16, False)
    """
    merge = config.spatial_merge_size
    for frames, height, width in grids:
        if min(frames, height, width) < 1 or height % merge or width % merge:
            raise RequestError(
                f"image grid must have frames, and rows and columns that are multiples of {merge}; "
                f"got {(frames, height, width)}. Resize the image."
            )
    pieces = [_piece(height, width, config) for _, height, width in grids]
    parts = [piece for piece, grid in zip(pieces, grids, strict=True) for _ in range(grid[0])]
    lengths = [part[0].shape[0] for part in parts]
    longest, patches = max(lengths, default=0), sum(lengths)
    places = torch.arange(longest)
    slots = [places[:n] + i * longest for i, n in enumerate(lengths)]
    empty = tuple(part[:0] for part in _piece(merge, merge, config))
    index, weight, cos, sin = (torch.cat(column) for column in zip(empty, *parts, strict=True))
    return VisionLayout(
        pos_index=index,
        pos_weight=weight,
        cos=cos,
        sin=sin,
        slots=torch.cat([places[:0], *slots]),
        key_mask=places[None] < torch.tensor(lengths, dtype=torch.int64)[:, None],
        patches=patches,
        dense=len(set(lengths)) <= 1,
    )


@functools.lru_cache(maxsize=64)
def _piece(
    height: int, width: int, config: Qwen3VLVisionConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return position entries and weights [n, 4], cos and sin [n, head_dim] of one frame.

    Patches are in the order of merge blocks: block row, block column, row and column inside.
    """
    side, merge = config.table_side, config.spatial_merge_size
    order = torch.arange(height * width).view(height // merge, merge, width // merge, merge)
    order = order.permute(0, 2, 1, 3).reshape(-1)
    row, column = order // width, order % width

    def corners(count: int, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the entries before and behind each place of an axis, and the share of the last."""
        spread = torch.linspace(0, side - 1, count)
        low = spread.long()
        return low[at], (low + 1).clamp(max=side - 1)[at], (spread - low)[at]

    top, bottom, down = corners(height, row)
    left, right, along = corners(width, column)
    index = torch.stack(
        [top * side + left, top * side + right, bottom * side + left, bottom * side + right], 1
    )
    weight = torch.stack(
        [(1 - down) * (1 - along), (1 - down) * along, down * (1 - along), down * along], 1
    )
    even = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32)
    frequencies = 1.0 / ROPE_THETA ** (even / (config.head_dim // 2))
    angles = torch.cat([row[:, None] * frequencies, column[:, None] * frequencies], dim=1)
    angles = torch.cat([angles, angles], dim=1)
    return index, weight, angles.cos(), angles.sin()
