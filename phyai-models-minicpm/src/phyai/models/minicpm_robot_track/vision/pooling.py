"""Adaptive average pooling of square token grids, as small matrices.

A cell of the result is the mean of a rectangle of the grid, so rows and columns can be pooled one
after the other, tokens stay as they are (features last), and two poolings in a row are one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import TypeAlias

import torch
from torch import Tensor, nn

from phyai.errors import ConfigError

Record: TypeAlias = Callable[[str, Tensor], None]

COARSE_TOKENS, FINE_TOKENS = 4, 64


def pool_table(inputs: int, outputs: int) -> Tensor:
    """Return [outputs, inputs] float64: output i averages inputs floor(i n/m) .. ceil((i+1) n/m).

    >>> pool_table(3, 2).tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """
    table = torch.zeros(outputs, inputs, dtype=torch.float64)
    for i in range(outputs):
        first, end = i * inputs // outputs, -(-(i + 1) * inputs // outputs)
        table[i, first:end] = 1.0 / (end - first)
    return table


def pool_grid(tokens: Tensor, table: Tensor) -> Tensor:
    """Return a square grid pooled in both directions.

    Shapes: tokens [F, n * n, C] row by row, table [m, n] of tokens' dtype -> [F, m * m, C].
    """
    frames, _, width = tokens.shape
    out, side = table.shape
    rows = torch.matmul(table, tokens.reshape(frames, side, side * width))
    cells = torch.matmul(table, rows.view(frames * out, side, width))
    return cells.view(frames, out * out, width)


class GridPool(nn.Module):
    """The coarse and the fine tokens of a frame out of both towers' patch features.

    SigLIP's grid is first pooled to DINOv3's, then both to ``coarse_tokens`` and ``fine_tokens``;
    the first step is part of the tables, so neither that grid nor the joined one is made.
    Shapes: dino [F, N, Cd], siglip [F, M, Cs] -> two float32 [F, tokens, Cd + Cs].
    Raises: ConfigError for token counts that are no square grid.

    >>> pool = GridPool(36, 49)
    >>> [part.shape[1:] for part in pool(torch.zeros(1, 36, 7), torch.zeros(1, 49, 9))]
    [torch.Size([4, 16]), torch.Size([64, 16])]
    """

    to_dino: Tensor

    def __init__(
        self,
        dino_tokens: int,
        siglip_tokens: int,
        *,
        coarse_tokens: int = COARSE_TOKENS,
        fine_tokens: int = FINE_TOKENS,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        dino = _side(dino_tokens, "DINOv3 tokens")
        to_dino = pool_table(_side(siglip_tokens, "SigLIP tokens"), dino)
        tables = {"to_dino": to_dino}
        for label, tokens in (("coarse", coarse_tokens), ("fine", fine_tokens)):
            table = pool_table(dino, _side(tokens, f"{label}_tokens"))
            tables[f"dino_{label}"], tables[f"siglip_{label}"] = table, table @ to_dino
        for name, table in tables.items():
            self.register_buffer(name, table.to(device, torch.float32), persistent=False)

    def forward(
        self, dino: Tensor, siglip: Tensor, record: Record | None = None
    ) -> tuple[Tensor, Tensor]:
        """record: gets ``siglip_resized``, which is otherwise not made."""
        dino, siglip = dino.float(), siglip.float()
        if record is not None:
            record("siglip_resized", pool_grid(siglip, self.to_dino))
        return self._pooled(dino, siglip, "coarse"), self._pooled(dino, siglip, "fine")

    def _pooled(self, dino: Tensor, siglip: Tensor, label: str) -> Tensor:
        first = pool_grid(dino, self.get_buffer(f"dino_{label}"))
        second = pool_grid(siglip, self.get_buffer(f"siglip_{label}"))
        return torch.cat((first, second), dim=-1)


def pool_features(
    dino: Tensor,
    siglip: Tensor,
    *,
    coarse_tokens: int = COARSE_TOKENS,
    fine_tokens: int = FINE_TOKENS,
    record: Record | None = None,
) -> tuple[Tensor, Tensor]:
    """Return coarse and fine tokens of any two square grids; builds its tables on every call.

    Shapes, record and errors: see ``GridPool``.
    """
    pool = GridPool(
        dino.shape[1],
        siglip.shape[1],
        coarse_tokens=coarse_tokens,
        fine_tokens=fine_tokens,
        device=dino.device,
    )
    out: tuple[Tensor, Tensor] = pool(dino, siglip, record)
    return out


def _side(tokens: int, name: str) -> int:
    side = isqrt(max(tokens, 0))
    if side < 1 or side * side != tokens:
        raise ConfigError(
            f"{name} must form a square grid; got {tokens}. Use a count such as 4 or 64."
        )
    return side
