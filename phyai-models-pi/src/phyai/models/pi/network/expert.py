"""The action expert: its layer i attends to the language model's K/V of layer i."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.pi.config import GemmaConfig
from phyai.models.pi.network.gemma import AdaptiveNorm, DecoderLayer, PlainNorm, Stream
from phyai.models.pi.network.segment import Segment

EXPERT = "paligemma_with_expert.gemma_expert.model"

Modulation = Callable[[int], Tensor]
"""modulation(i): float32 [3, W] or [3, B, T, W] of norm i (2 per layer, then the final one)."""


class Expert(nn.Module):
    """Layers and final norm; ``adaptive`` norms take a modulation (pi0.5), plain ones none.

    split_kv: some calls want only K/V of the last layer.
    """

    def __init__(
        self, config: GemmaConfig, at: Placement, *, adaptive: bool, split_kv: bool = False
    ) -> None:
        super().__init__()
        self.config, self.adaptive, self.dtype = config, adaptive, at.dtype
        norm = AdaptiveNorm if adaptive else PlainNorm
        last = config.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            DecoderLayer(f"{EXPERT}.layers.{i}", config, at, norm, split_kv=split_kv and i == last)
            for i in range(config.num_hidden_layers)
        )
        self.norm = norm(f"{EXPERT}.norm", config.hidden_size, config.rms_norm_eps, at)

    @property
    def num_norms(self) -> int:
        return 2 * len(self.layers) + 1

    def forward(
        self,
        x: Tensor,
        cache: Cache,
        segment: Segment,
        modulation: Modulation | None = None,
        *,
        only_kv: bool = False,
    ) -> Tensor | None:
        """Return the final-norm output [B, T, W] in float32; None when only K/V were wanted.

        x: float32 [B, T, W], cast to the stack's dtype on entry.
        """
        stream, rotation = Stream(x.to(self.dtype)), segment.rotation(cache)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x, n, gate = layer.norm1(stream, self._mod(modulation, 2 * i))
            target = segment.target(cache, i)
            if only_kv and i == last:
                layer.project_kv(n, rotation, target)
                return None
            q = layer.project(n, rotation, target)
            mixed = segment.attend(cache, i, q)
            stream = layer.finish(x, mixed, gate, self._mod(modulation, 2 * i + 1))
        out: Tensor = self.norm(stream, self._mod(modulation, self.num_norms - 1)).n.float()
        return out

    def modulation_table(self, cond: Tensor) -> Tensor:
        """Return all modulations [N, num_norms, 3, W] float32 of conditions cond [N, W]."""
        norms: list[nn.Module] = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            norms += [layer.norm1, layer.norm2]
        norms.append(self.norm)
        width = self.config.hidden_size
        rows = []
        for norm in norms:
            assert isinstance(norm, AdaptiveNorm)
            rows.append(norm.dense(cond).view(-1, 3, width))
        return torch.stack(rows, dim=1)

    def _mod(self, modulation: Modulation | None, index: int) -> Tensor | None:
        return None if modulation is None else modulation(index)
