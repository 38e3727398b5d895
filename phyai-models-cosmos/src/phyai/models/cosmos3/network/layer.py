"""One expert's half of a layer; text and media have the same one under other names."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from phyai.layers import (
    ColumnLinear,
    Placement,
    QKVLinear,
    RMSNorm,
    RotatedHeadNorm,
    RowLinear,
)
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.parallel import HeadShards


class LayerNames(NamedTuple):
    """Checkpoint names of one expert in one layer; ``qkv`` and ``head_norms`` in this order."""

    qkv: tuple[str, str, str]
    head_norms: tuple[str, str]
    out: str
    norm1: str
    norm2: str
    mlp: str


def text_names(layer: int) -> LayerNames:
    """Return the names of the text expert (UND)."""
    name = f"layers.{layer}"
    attn = f"{name}.self_attn"
    return LayerNames(
        (f"{attn}.to_q", f"{attn}.to_k", f"{attn}.to_v"),
        (f"{attn}.norm_q", f"{attn}.norm_k"),
        f"{attn}.to_out",
        f"{name}.input_layernorm",
        f"{name}.post_attention_layernorm",
        f"{name}.mlp",
    )


def media_names(layer: int) -> LayerNames:
    """Return the names of the media expert (GEN)."""
    name = f"layers.{layer}"
    attn = f"{name}.self_attn"
    return LayerNames(
        (f"{attn}.add_q_proj", f"{attn}.add_k_proj", f"{attn}.add_v_proj"),
        (f"{attn}.norm_added_q", f"{attn}.norm_added_k"),
        f"{attn}.to_add_out",
        f"{name}.input_layernorm_moe_gen",
        f"{name}.post_attention_layernorm_moe_gen",
        f"{name}.mlp_moe_gen",
    )


class ExpertLayer(nn.Module):
    """x += out(Attn(norm1(x))); x += down(silu(gate n) * up n), n = norm2(x).

    The attention itself is the caller's. A sum is made together with the norm that reads it, so
    that activations travel as x and what is still to be added, y (None = nothing).
    only_kv: keys and values are all that is wanted of this layer; nothing else exists.
    Shapes: x, y [B, T, W] alike on all tensor-parallel ranks; q [B, T, H, D], k and v [B, T, K, D]
        of this rank's heads.
    """

    def __init__(
        self, names: LayerNames, config: Cosmos3Config, at: Placement, *, only_kv: bool = False
    ) -> None:
        super().__init__()
        width, eps, self.head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.shards = HeadShards.of(
            config.num_attention_heads, config.num_key_value_heads, at.tp.size, at.tp.rank
        )
        self.only_kv = only_kv
        self.norm1 = RMSNorm(names.norm1, width, eps, at, offset=0.0)
        legs = "kv" if only_kv else "qkv"
        self.qkv = QKVLinear(
            names.qkv[-len(legs) :], width, self.shards, self.head_dim, at, legs=legs
        )
        self.norm1.feed(self.qkv)
        self.k_norm = RotatedHeadNorm(names.head_norms[1], self.head_dim, eps, at)
        if only_kv:
            return
        self.q_norm = RotatedHeadNorm(names.head_norms[0], self.head_dim, eps, at)
        self.out = RowLinear(names.out, config.q_size, width, at)
        self.norm2 = RMSNorm(names.norm2, width, eps, at, offset=0.0)
        self.gate_up = ColumnLinear(
            [f"{names.mlp}.gate_proj", f"{names.mlp}.up_proj"],
            width,
            [config.intermediate_size] * 2,
            at,
            epilogue="silu_mul",
        )
        self.down = RowLinear(f"{names.mlp}.down_proj", config.intermediate_size, width, at)
        self.norm2.feed(self.gate_up)

    def project(
        self, x: Tensor, y: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x + y, and q, k (normed and rotated) and v of it."""
        x, heads = self._heads(x, y)
        counts = [self.shards.heads, self.shards.kv_heads, self.shards.kv_heads]
        q, k, v = torch.split(heads, counts, dim=2)
        return x, self.q_norm(q, cos, sin), self.k_norm(k, cos, sin), v

    def project_kv(
        self, x: Tensor, y: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return k and v of x + y; of a layer with ``only_kv``."""
        k, v = self._heads(x, y)[1].chunk(2, dim=2)
        return self.k_norm(k, cos, sin), v

    def finish(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's result as x and y, from its input x and what attention gave."""
        x, n = self.norm2(x, self.out(mixed.flatten(-2)))
        return x, self.down(self.gate_up(n))

    def _heads(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        if y is None:
            n = self.norm1(x)
        else:
            x, n = self.norm1(x, y)
        joined = self.qkv(n)
        return x, joined.view(*joined.shape[:-1], -1, self.head_dim)
