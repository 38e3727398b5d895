"""The tracker written down plainly: dense, row by row, float64, nothing kept or skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class TrackReference:
    """Waypoints of one window from a checkpoint's config and tensors, by their released names."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config, self.backbone = config, config["backbone_config"]
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def trajectory(self, ids: Tensor, coarse: Tensor, fine: Tensor, times: Tensor) -> Tensor:
        """Return [waypoints, 3].

        ids [T]; coarse [history, tokens, C] of every slot; fine [tokens, C]; times [history + 1].
        """
        parts = [self._weight("backbone.embed_tokens")[ids]]
        for slot, frame in enumerate(coarse):
            parts += [self._marker(int(times[slot]), 0)[None], self._projected(frame)]
        parts += [self._marker(int(times[-1]), 1)[None], self._projected(fine)]
        parts.append(self.tensors["control_query"][0])
        return self._head(self._decode(torch.cat(parts))[-1])

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight(name), self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        shape = (x.shape[-1],)
        return functional.layer_norm(x, shape, self._weight(name), self.tensors[f"{name}.bias"])

    def _rms(self, name: str, x: Tensor) -> Tensor:
        size = (x.pow(2).mean(-1, keepdim=True) + self.backbone["rms_norm_eps"]).sqrt()
        return x / size * self._weight(name)

    def _marker(self, time: int, stream: int) -> Tensor:
        tables = [self._weight(f"temporal_markers.{n}_embedding") for n in
                  ("time", "stream", "camera")]  # fmt: skip
        return tables[0][time] + tables[1][stream] + tables[2][0]

    def _projected(self, features: Tensor) -> Tensor:
        h = self._norm("vision_projector.layers.0", features.double())
        h = functional.gelu(self._linear("vision_projector.layers.1", h))
        return self._linear("vision_projector.layers.3", h)

    def _decode(self, x: Tensor) -> Tensor:
        layers = self.backbone["num_hidden_layers"]
        scale = self.backbone["scale_depth"] / math.sqrt(layers)
        for i in range(layers):
            name = f"backbone.layers.{i}"
            x = x + scale * self._attention(name, self._rms(f"{name}.input_layernorm", x))
            n = self._rms(f"{name}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{name}.mlp.{leg}_proj", n) for leg in ("gate", "up"))
            x = x + scale * self._linear(f"{name}.mlp.down_proj", functional.silu(gate) * up)
        return self._rms("backbone.norm", x)

    def _attention(self, name: str, n: Tensor) -> Tensor:
        heads, kept = (self.backbone[f"num_{k}_heads"] for k in ("attention", "key_value"))
        size = len(n)
        q, k, v = (self._linear(f"{name}.self_attn.{leg}_proj", n).view(size, -1, self._head_dim())
                   for leg in "qkv")  # fmt: skip
        q, k = self._rotated(q), self._rotated(k)
        k, v = (part.repeat_interleave(heads // kept, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self._head_dim())
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        probs = scores.masked_fill(later, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probs, v).reshape(size, -1)
        return self._linear(f"{name}.self_attn.o_proj", mixed)

    def _head_dim(self) -> int:
        return int(self.backbone["hidden_size"] // self.backbone["num_attention_heads"])

    def _rotated(self, x: Tensor) -> Tensor:
        """Turn each pair (i, i + half) by position * frequency."""
        half, rope = self._head_dim() // 2, self.backbone["rope_scaling"]
        original = rope["original_max_position_embeddings"]
        factors = rope["long_factor" if len(x) > original else "short_factor"]
        ratio = self.backbone["max_position_embeddings"] / original
        stretch = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
        out = x.clone()
        for i in range(half):
            frequency = self.backbone["rope_theta"] ** (-i / half) / factors[i]
            angle = torch.arange(len(x), dtype=torch.float64)[:, None] * frequency
            low, high, cos, sin = x[..., i], x[..., i + half], angle.cos(), angle.sin()
            out[..., i] = (low * cos - high * sin) * stretch
            out[..., i + half] = (high * cos + low * sin) * stretch
        return out

    def _head(self, control: Tensor) -> Tensor:
        h = self._norm("trajectory_head.layers.0", control)
        hidden = len(self.config["trajectory_hidden_dims"])
        for i in range(hidden):
            h = functional.gelu(self._linear(f"trajectory_head.layers.{1 + 3 * i}", h))
        h = self._norm(f"trajectory_head.layers.{1 + 3 * hidden}", h)
        out = self._linear(f"trajectory_head.layers.{2 + 3 * hidden}", h)
        if self.config["use_tanh_actions"]:
            out = out.tanh()
        scale = torch.tensor([self.config["xy_scale"]] * 2 + [1.0], dtype=torch.float64)
        return (out.view(-1, 3) * scale).float()
