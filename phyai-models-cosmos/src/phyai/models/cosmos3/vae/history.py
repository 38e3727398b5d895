"""What the layers remember between the chunks of one clip."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class History:
    """The last frames each temporal layer has seen; made anew for every clip, or tile of one.

    Frames are stacked in front of rows, [T * rows, C, H, W], so a stretch of time is a slice.

    >>> import torch
    >>> from torch import nn
    >>> from phyai.models.cosmos3.vae.history import History
    >>> history, layer = History(rows=1), nn.Identity()
    >>> history.join(layer, torch.tensor([[1.0], [2.0], [3.0]]), keep=2).shape
    torch.Size([3, 1])
    >>> history.join(layer, torch.tensor([[4.0]]), keep=2).flatten().tolist()
    [2.0, 3.0, 4.0]
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.first = True
        """True during the first chunk, which holds one frame."""
        self._frames: dict[nn.Module, Tensor] = {}

    def join(self, layer: nn.Module, frames: Tensor, keep: int) -> Tensor:
        """Return what the layer remembers followed by ``frames``; it keeps the last ``keep``.

        Less than ``keep`` frames come in front when there were no more; none on the first call.
        """
        past = self._frames.get(layer)
        joined = frames if past is None else torch.cat([past, frames])
        last = joined[-keep * self.rows :]
        # A view would keep the whole chunk alive.
        self._frames[layer] = last if last.shape[0] == joined.shape[0] else last.clone()
        return joined
