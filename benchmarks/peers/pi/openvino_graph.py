"""The network of ``hf_network`` as one graph for OpenVINO, the Euler steps unrolled.

What is constant for a fixed number of steps is a constant of the graph: the time grid, the adaRMS
modulations, the rotary tables. Without padding there is no mask. So OpenVINO gets less to compute
than the eager peer, never more.
"""

from __future__ import annotations

import torch
from benchmarks.peers.pi.hf_network import (
    AdaptiveNorm,
    KeysValues,
    OfficialPi05,
    PrefixCache,
    additive,
)
from torch import Tensor, nn

Rope = tuple[Tensor, Tensor]


class OneGraph(nn.Module):
    """images, tokens, noise (and masks when padded) -> actions, for fixed shapes.

    padded: take image_masks [B, C] and token_mask [B, n] too.
    """

    cos: Tensor
    sin: Tensor
    tables: Tensor

    def __init__(self, model: OfficialPi05, steps: int, positions: int, *, padded: bool) -> None:
        super().__init__()
        self.model, self.steps, self.padded = model, steps, padded
        self.positions = positions
        longest = positions + model.sizes.chunk
        cos, sin = model.rotary(torch.zeros(1, dtype=torch.float32), torch.arange(longest)[None])
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        time = torch.tensor([1.0 - k / steps for k in range(steps)])
        with torch.no_grad():
            tables = _modulations(model, model.condition(time))
        self.register_buffer("tables", tables, persistent=False)
        for layer in model.expert.layers:  # the tables are all that is left of them
            layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
        model.expert.norm = nn.Identity()

    def forward(self, images: Tensor, tokens: Tensor, noise: Tensor, *masks: Tensor) -> Tensor:
        """See ``batch.Batch`` for shapes; masks: image_masks and token_mask when padded."""
        model, valid = self.model, None
        features = model.embed_images(images)
        words = model.embedding(tokens) * model.sizes.text.hidden_size**0.5
        x = torch.cat([*features, words], dim=1)
        if self.padded:
            image_masks, token_mask = masks
            patches = image_masks.repeat_interleave(model.sizes.vision.patches, dim=1)
            valid = torch.cat([patches, token_mask], dim=1)
        prefix = self._prefill(x, valid)
        return self._denoise(noise, prefix, valid)

    def _rope(self, valid: Tensor | None, start: int, count: int) -> Rope:
        if valid is None:
            return self.cos[:, start : start + count], self.sin[:, start : start + count]
        at = valid.sum(1, keepdim=True) + torch.arange(count) if start else valid.cumsum(1) - 1
        at = at.clamp(min=0)  # an invalid first camera; nobody reads its rows
        return self.cos[0][at], self.sin[0][at]

    def _prefill(self, x: Tensor, valid: Tensor | None) -> KeysValues:
        mask = None if valid is None else additive(valid[:, None, :] & valid[:, :, None])
        rope, cache = self._rope(valid, 0, self.positions), PrefixCache()
        for layer in self.model.language.layers:
            x = layer(x, rope, mask, cache)
        return cache.layers

    def _denoise(self, x: Tensor, prefix: KeysValues, valid: Tensor | None) -> Tensor:
        chunk = self.model.sizes.chunk
        mask = None
        if valid is not None:
            own = torch.ones(valid.shape[0], chunk, dtype=torch.bool)
            seen = torch.cat([valid, own], dim=1)
            mask = additive(seen[:, None, :].expand(-1, chunk, -1))
        rope = self._rope(valid, self.positions, chunk)
        for k in range(self.steps):
            x = x - self._velocity(x, self.tables[k], prefix, rope, mask) / self.steps
        return x

    def _velocity(
        self, x: Tensor, rows: Tensor, prefix: KeysValues, rope: Rope, mask: Tensor | None
    ) -> Tensor:
        """rows [2 L + 1, 3, W]: scale, shift and gate of every norm of this step."""
        model, cache = self.model, PrefixCache(prefix)
        hidden = model.action_in_proj(x)
        for i, layer in enumerate(model.expert.layers):
            first, second = rows[2 * i], rows[2 * i + 1]
            attended = layer.self_attn(self._norm(hidden, first), rope, mask, cache)[0]
            hidden = hidden + first[2] * attended
            hidden = hidden + second[2] * layer.mlp(self._norm(hidden, second))
        v: Tensor = model.action_out_proj(self._norm(hidden, rows[-1]))
        return v

    def _norm(self, x: Tensor, row: Tensor) -> Tensor:
        eps = self.model.sizes.expert.rms_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + row[0]) + row[1]


def _modulations(model: OfficialPi05, cond: Tensor) -> Tensor:
    """Return [N, 2 L + 1, 3, W] from cond [N, W]: each norm's projection, the final one last."""
    norms: list[AdaptiveNorm] = []
    for layer in model.expert.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    norms.append(model.expert.norm)
    rows = torch.stack([norm.dense(cond) for norm in norms], dim=1)
    return rows.view(*rows.shape[:2], 3, -1)
