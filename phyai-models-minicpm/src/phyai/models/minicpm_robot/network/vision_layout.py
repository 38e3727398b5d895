"""What the vision tower must know about the patches of a batch: index lists. Host only.

Patches are computed in merge order from the start: the four patches of a window stand side by
side, and so do the four windows of an image token. Attention does not care about the order, so
nothing is moved at either merger.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from phyai.errors import CapacityError, RequestError
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig

WINDOW = 4
"""Tokens that become one at a merger, two by two."""


class Segments(NamedTuple):
    """Which of T packed tokens attend to each other: those of one image.

    slots int64 [T]: place in the padded [N * L]; padding tokens have N * L.
    key_mask bool [N, L]: the places that are taken.
    runs: (images, tokens per image) of neighbouring images of one size, covering all tokens: slots
        and mask are not needed. None: which images have which size is data.
    """

    slots: Tensor
    key_mask: Tensor
    runs: tuple[tuple[int, int], ...] | None

    def merged(self) -> Segments:
        """Return the segments after every four neighbours became one."""
        runs = self.runs and tuple((count, length // WINDOW) for count, length in self.runs)
        mask = self.key_mask[:, ::WINDOW].contiguous()  # once, not in every layer
        return Segments(self.slots[::WINDOW] // WINDOW, mask, runs)


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """Tensors and sizes of one batch of patches.

    P patches, packed, in merge order. N images of at most L patches each.

    order int64 [P]: where the patch stands in what the tower is given; padding patches read some
        patch that is there.
    positions int64 [P]: entry of the position table.
    slots, key_mask, runs: as in ``Segments``.
    patches: how many patches, the first ones, are the batch's own; the rest is padding.
    merge: patches per image token.
    """

    order: Tensor
    positions: Tensor
    slots: Tensor
    key_mask: Tensor
    runs: tuple[tuple[int, int], ...] | None
    patches: int
    merge: int

    @property
    def images(self) -> int:
        return self.key_mask.shape[0]

    @property
    def longest(self) -> int:
        return self.key_mask.shape[1]

    @property
    def image_tokens(self) -> int:
        """Image tokens of the batch's own patches, the first ones of the tower's output."""
        return self.patches // self.merge

    @property
    def segments(self) -> Segments:
        return Segments(self.slots, self.key_mask, self.runs)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, for buffers that graphs read."""
        names = ("order", "positions", "slots", "key_mask")
        return {name: getattr(self, name) for name in names}

    def on(self, tensors: Mapping[str, Tensor]) -> VisionLayout:
        """Return the layout with other tensors of the same shapes, such as those of a device."""
        changed: dict[str, Any] = dict(tensors)
        return replace(self, **changed)

    def to(self, device: torch.device) -> VisionLayout:
        return self.on({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def placed(self, rows: Tensor) -> VisionLayout:
        """Return the layout for patches that lie apart: patch n of the images is given as rows[n].

        rows int64 [patches], ascending. Patches packed without gaps need no ``placed``.
        """
        return replace(self, order=rows.index_select(0, self.order) if len(rows) else self.order)

    def padded(
        self, patches: int, images: int, longest: int, *, even: bool = False
    ) -> VisionLayout:
        """Return the layout at the sizes of a bucket: P, N and L.

        even: whoever uses the bucket promises ``images`` images of ``longest`` patches, always;
            then nothing is moved or masked.
        Raises: CapacityError when the batch does not fit.
        """
        exact = not even or (self.runs or ()) == ((images, longest),)
        if self.patches > patches or self.images > images or self.longest > longest or not exact:
            kind = f"exactly {images} images of {longest}" if even else f"{images} images of"
            raise CapacityError(
                f"images must fit the bucket of {patches} patches, {kind} at most {longest} "
                f"patches; got {self.patches}, {self.images} and {self.longest}. "
                "Use a larger bucket."
            )
        if patches % self.merge or longest % self.merge:
            raise CapacityError(
                f"buckets of patches must be multiples of {self.merge}; got {patches} and "
                f"{longest}. Round them up."
            )
        more, own = patches - len(self.order), max(self.longest, 1)
        slots = self.slots // own * longest + self.slots % own
        mask = functional.pad(
            self.key_mask, (0, longest - self.longest, 0, images - self.images), value=False
        )
        return VisionLayout(
            order=_lengthened(self.order, more, 0),
            positions=_lengthened(self.positions, more, 0),
            slots=_lengthened(slots, more, images * longest),
            key_mask=mask,
            runs=self.runs if even and patches == images * longest else None,
            patches=self.patches,
            merge=self.merge,
        )

    def natural(self, merged: bool = False) -> Tensor:
        """Return where the own patches (merged: their windows) stand, in row-major order.

        For those who compare with a tower that keeps patches in that order.
        """
        own = self.order[: self.patches]
        return torch.argsort(own[::WINDOW] if merged else own)

    def official(self) -> dict[str, Tensor]:
        """Return the index lists an official tower works with, made of this layout's.

        position_ids, window_index int64 [patches]; window_cu_seqlens int32 [windows + 1].
        """
        natural, windows = self.natural(), self.natural(merged=True)
        rank = torch.empty_like(natural)
        rank[natural] = torch.arange(len(natural), device=natural.device)
        index = rank.view(-1, WINDOW)[windows].flatten()
        return {
            "position_ids": self.positions[natural],
            "window_index": index,
            "window_cu_seqlens": torch.arange(0, len(natural) + 1, WINDOW, dtype=torch.int32),
        }


def vision_layout(grids: Sequence[tuple[int, int]], config: MiniCPMRobotConfig) -> VisionLayout:
    """Return the layout of images with these grids (rows, columns of patches); none is fine.

    Raises: RequestError for a grid that is empty or cannot be merged.

    >>> from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
    >>> layout = vision_layout([(4, 8), (4, 4)], MiniCPMRobotConfig())
    >>> layout.patches, layout.image_tokens, layout.longest, layout.runs
    (48, 3, 32, ((1, 32), (1, 16)))
    >>> layout.order[:8].tolist()
    [0, 1, 8, 9, 2, 3, 10, 11]
    """
    side = config.merge
    for grid in grids:
        if min(grid) < 1 or grid[0] % side or grid[1] % side:
            raise RequestError(
                f"image grid must have rows and columns of patches that are multiples of {side}; "
                f"got {tuple(grid)}. Resize the image."
            )
    lengths = [rows * columns for rows, columns in grids]
    longest, patches = max(lengths, default=0), sum(lengths)
    places, none = torch.arange(longest), torch.zeros(0, dtype=torch.int64)
    order, positions, slots = [none], [none], [none]
    first = 0
    for i, (rows, columns) in enumerate(grids):
        within, table = _piece(rows, columns, side, config.vision.positions_per_side)
        order.append(within + first)
        positions.append(table)
        slots.append(places[: lengths[i]] + i * longest)
        first += lengths[i]
    return VisionLayout(
        order=torch.cat(order),
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        key_mask=places[None] < torch.tensor(lengths, dtype=torch.int64)[:, None],
        runs=tuple((len(list(same)), length) for length, same in groupby(lengths)),
        patches=patches,
        merge=side * side,
    )


@functools.lru_cache(maxsize=64)
def _piece(rows: int, columns: int, merge: int, table_side: int) -> tuple[Tensor, Tensor]:
    """Return the row-major number and the position entry of each patch, in merge order."""
    # Float32 throughout: its rounding decides which entry a patch on a boundary gets.
    bounds = torch.arange(1 / table_side, 1.0, 1 / table_side, dtype=torch.float32)

    def entries(count: int) -> Tensor:
        at = torch.arange(count).to(torch.float32) / count
        return torch.bucketize(at, bounds, right=True)

    table = entries(rows)[:, None] * table_side + entries(columns)
    numbers = torch.arange(rows * columns)
    if merge == 4:
        blocks = numbers.view(rows // 4, 2, 2, columns // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    else:
        blocks = numbers.view(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3)
    order = blocks.reshape(-1)
    return order, table.flatten()[order]


def _lengthened(x: Tensor, more: int, fill: int) -> Tensor:
    return torch.cat([x, x.new_full((more,), fill)]) if more else x
