"""The MiniCPM4 decoder over packed tokens; of the last layer only what the control token needs.

Tokens of all rows are packed into one list. For attention they are put at their places of a padded
[rows, stride] layout: text, window, then unused places. Those stand behind all tokens of the row,
so causal attention never reaches them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from phyai.layers import Linear, Placement, RMSNorm
from phyai.models.minicpm_robot_track.config import BackboneSizes
from phyai.weights import claim

Record: TypeAlias = Callable[[str, Tensor], None]
KeepKV: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""Takes a layer's number, its keys (rotated) and its values, packed [M, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Past:
    """Keys and values of tokens computed before: [rows, layers, T, kv_heads, head_dim] each.

    slots [rows * T]: their places; unused ones go to the place behind the layout.
    """

    k: Tensor
    v: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """Where M packed tokens stand.

    cos, sin [M, head_dim]; slots [M]: places in the layout [rows, stride], rows * stride for a
    token nobody reads.
    dense: the tokens are the layout, place by place.
    key_mask: bool [rows, stride], which places hold tokens; None = all.
    control_at [rows]: the packed index of each row's last token; None = only keys are wanted.
    """

    cos: Tensor
    sin: Tensor
    slots: Tensor
    rows: int
    stride: int
    dense: bool = False
    key_mask: Tensor | None = None
    control_at: Tensor | None = None
    past: Past | None = None


class _Layer(nn.Module):
    """What both kinds of layers share; y is the branch still to be added, already scaled."""

    def __init__(self, name: str, sizes: BackboneSizes, at: Placement) -> None:
        super().__init__()
        width, eps, attn, mlp = sizes.hidden_size, sizes.rms_norm_eps, "self_attn", "mlp"
        self.heads, self.kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        self.head_dim, self.scale = sizes.head_dim, sizes.head_dim**-0.5
        self.residual = sizes.residual_scale
        self.q_size, self.kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.legs = [f"{name}.{attn}.{leg}_proj" for leg in "qkv"]
        self.norm1 = RMSNorm(f"{name}.input_layernorm", width, eps, at, offset=0.0)
        self.out = Linear(f"{name}.{attn}.o_proj", self.q_size, width, at)
        self.norm2 = RMSNorm(f"{name}.post_attention_layernorm", width, eps, at, offset=0.0)
        self.gate_up = Linear(
            [f"{name}.{mlp}.gate_proj", f"{name}.{mlp}.up_proj"],
            width,
            [sizes.intermediate_size] * 2,
            at,
            epilogue="silu_mul",
        )
        self.down = Linear(f"{name}.{mlp}.down_proj", sizes.intermediate_size, width, at)
        self.norm2.feed(self.gate_up)
        self._rope = at.select("apply_rope_fp32", head_dim=self.head_dim)
        self._facts = {"head_dim": self.head_dim, "heads": self.heads, "kv_heads": self.kv_heads}
        self._causal = at.select("causal_attention", **self._facts)

    def normed(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y and its norm."""
        if y is None:
            return x, self.norm1(x)
        out: tuple[Tensor, Tensor] = self.norm1(x, y)
        return out

    def rotated(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return heads [M, H, head_dim] rotated by their positions."""
        out: Tensor = self._rope(heads[None], cos[None], sin[None])
        return out[0]

    def placed(self, packed: Tensor, tokens: Tokens, past: Tensor | None) -> Tensor:
        """Return packed [M, H, D] in the layout, [rows, stride, H, D]."""
        shape = (tokens.rows, tokens.stride, *packed.shape[1:])
        if tokens.dense:
            return packed.reshape(shape)
        buffer = packed.new_zeros(tokens.rows * tokens.stride + 1, *packed.shape[1:])
        if past is not None:
            assert tokens.past is not None
            buffer.index_copy_(0, tokens.past.slots, past.flatten(0, 1))
        buffer.index_copy_(0, tokens.slots, packed)
        return buffer[:-1].view(shape)

    def keys(self, index: int, k: Tensor, v: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return keys and values in the layout, those of the past among them."""
        past = tokens.past
        if past is None:
            return self.placed(k, tokens, None), self.placed(v, tokens, None)
        old = past.k[:, index], past.v[:, index]
        return self.placed(k, tokens, old[0]), self.placed(v, tokens, old[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tokens: Tokens) -> Tensor:
        """Return causal attention of packed q over the layout's k and v, packed [M, q_size]."""
        mixed: Tensor = self._causal(self.placed(q, tokens, None), k, v, self.scale)
        flat = mixed.flatten(2).flatten(0, 1)
        if tokens.dense:
            return flat
        # a token nobody reads takes the last place's result
        return flat.index_select(0, tokens.slots.clamp(max=flat.shape[0] - 1))

    def finish(self, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return x with the attention's branch added, and the MLP's branch."""
        x, n = self.norm2(x, self.out(mixed) * self.residual)
        branch: Tensor = self.down(self.gate_up(n)) * self.residual
        return x, branch


class DecoderLayer(_Layer):
    """x += s o(attention(norm1(x))); x += s down(silu(gate n) * up n), n = norm2(x)."""

    def __init__(self, name: str, sizes: BackboneSizes, at: Placement) -> None:
        super().__init__(name, sizes, at)
        self.qkv = Linear(
            self.legs, sizes.hidden_size, [self.q_size, self.kv_size, self.kv_size], at
        )
        self.norm1.feed(self.qkv)

    def project(self, n: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k, rotated, and v of the normed tokens, packed."""
        joined = self.qkv(n).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        turned = self.rotated(joined[:, : self.heads + self.kv_heads], tokens.cos, tokens.sin)
        values = joined[:, self.heads + self.kv_heads :]
        return turned[:, : self.heads], turned[:, self.heads :], values


class LastLayer(_Layer):
    """The same with K and V for all tokens, and everything else for those who are read."""

    def __init__(self, name: str, sizes: BackboneSizes, at: Placement) -> None:
        super().__init__(name, sizes, at)
        width = sizes.hidden_size
        self.q = Linear(self.legs[0], width, self.q_size, at)
        self.kv = Linear(self.legs[1:], width, [self.kv_size] * 2, at)
        self._one = at.select("attention", masked=False, **self._facts)
        self._one_masked = at.select("attention", masked=True, **self._facts)

    def project_kv(self, n: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return k, rotated, and v of the normed tokens, packed."""
        k, v = self.kv(n).view(-1, 2, self.kv_heads, self.head_dim).unbind(1)
        return self.rotated(k, tokens.cos, tokens.sin), v

    def project_q(self, n: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return q of the normed tokens, rotated, packed."""
        return self.rotated(self.q(n).view(-1, self.heads, self.head_dim), cos, sin)

    def attend_last(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return attention [rows, q_size] of each row's last token [rows, H, D] over all of it."""
        if key_mask is None:
            mixed: Tensor = self._one(q[:, None], k, v, self.scale)
        else:
            mixed = self._one_masked(q[:, None], k, v, self.scale, key_mask=key_mask)
        return mixed.flatten(1)


class Backbone(nn.Module):
    """Token embedding, decoder layers and final norm.

    Embeddings are taken as they are: the checkpoint's ``scale_emb`` belongs to token ids that the
    decoder embeds itself, and this model hands it embeddings.
    """

    def __init__(self, name: str, sizes: BackboneSizes, at: Placement) -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, at.dtype
        self.embedding = claim(
            at.parameter(sizes.vocab_size, sizes.hidden_size), f"{name}.embed_tokens.weight"
        )
        last = sizes.num_hidden_layers - 1
        self.layers = nn.ModuleList(
            DecoderLayer(f"{name}.layers.{i}", sizes, at) for i in range(last)
        )
        self.last = LastLayer(f"{name}.layers.{last}", sizes, at)
        self.norm = RMSNorm(f"{name}.norm", sizes.hidden_size, sizes.rms_norm_eps, at, offset=0.0)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., W] of token ids."""
        return nn.functional.embedding(ids, self.embedding)

    def keys_only(self, x: Tensor, tokens: Tokens, keep: KeepKV) -> None:
        """Hand every layer's keys and values of x [M, W] to ``keep``; compute nothing else."""
        x, y = self._inner(x, tokens, None, keep)
        keep(len(self.layers), *self.last.project_kv(self.last.normed(x, y)[1], tokens))

    def forward(self, x: Tensor, tokens: Tokens, record: Record | None = None) -> Tensor:
        """Return the control tokens behind the final norm, [rows, W], of x [M, W].

        record: gets ``layers.<i>`` and ``norm`` of all tokens; the last layer then runs in full.
        """
        assert tokens.control_at is not None
        x, y = self._inner(x, tokens, record, None)
        last = self.last
        x, n = last.normed(x, y)
        k, v = last.keys(len(self.layers), *last.project_kv(n, tokens), tokens)
        if record is not None:
            self._record_last(x, n, k, v, tokens, record)
        at = tokens.control_at
        q = last.project_q(
            n.index_select(0, at), tokens.cos.index_select(0, at), tokens.sin.index_select(0, at)
        )
        mixed = last.attend_last(q, k, v, tokens.key_mask)
        x, y = last.finish(x.index_select(0, at), mixed)
        out: Tensor = self.norm(x, y)[1]
        return out

    def _inner(
        self, x: Tensor, tokens: Tokens, record: Record | None, keep: KeepKV | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return x and the branch to add to it, behind all layers but the last."""
        y: Tensor | None = None
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            x, n = layer.normed(x, y)
            q, k, v = layer.project(n, tokens)
            if keep is not None:
                keep(i, k, v)
            x, y = layer.finish(x, layer.attend(q, *layer.keys(i, k, v, tokens), tokens))
            if record is not None:
                record(f"layers.{i}", x + y)
        return x, y

    def _record_last(
        self, x: Tensor, n: Tensor, k: Tensor, v: Tensor, tokens: Tokens, record: Record
    ) -> None:
        last = self.last
        q = last.project_q(n, tokens.cos, tokens.sin)
        x, y = last.finish(x, last.attend(q, k, v, tokens))
        record(f"layers.{len(self.layers)}", x + y)
        record("norm", self.norm(x, y)[1])


def packed_rows(lens: list[int], rope_starts: list[int], stride: int) -> tuple[Tensor, Tensor]:
    """Return table rows and places of packed rows that start at position 0, int64 [M] each.

    >>> at, slots = packed_rows([2, 1], [0, 10], 3)
    >>> at.tolist(), slots.tolist()
    ([0, 1, 10], [0, 1, 3])
    """
    counts = [torch.arange(n) for n in lens]
    at = [start + count for start, count in zip(rope_starts, counts, strict=True)]
    slots = [i * stride + count for i, count in enumerate(counts)]
    return torch.cat(at), torch.cat(slots)
