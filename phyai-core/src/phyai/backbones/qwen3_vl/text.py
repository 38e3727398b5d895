"""The language model over packed tokens: per-head norms of Q and K, causal, deepstack added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from phyai.backbones.qwen3_vl.config import Qwen3VLTextConfig
from phyai.backbones.qwen3_vl.text_layout import TextLayout
from phyai.backbones.qwen3_vl.vision import Record
from phyai.errors import ConfigError
from phyai.layers import Linear, Placement, RMSNorm, RotatedHeadNorm
from phyai.weights import claim, mapped

KeepKV: TypeAlias = Callable[[int, Tensor, Tensor], None]
"""Takes a layer's number and its keys (rotated) and values, packed [M, kv_heads, head_dim]."""


class TextLayer(nn.Module):
    """x += o(Attn(norm1(x))); x += down(silu(gate n) * up n), n = norm2(x). Shapes: x [M, W]."""

    def __init__(self, name: str, config: Qwen3VLTextConfig, at: Placement) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.norm1 = RMSNorm(f"{name}.input_layernorm", width, eps, at, offset=0.0)
        self.qkv = Linear(
            [f"{attn}.{leg}_proj" for leg in "qkv"], width, [q_size, kv_size, kv_size], at
        )
        self.q_norm = RotatedHeadNorm(f"{attn}.q_norm", self.head_dim, eps, at)
        self.k_norm = RotatedHeadNorm(f"{attn}.k_norm", self.head_dim, eps, at)
        self.out = Linear(f"{attn}.o_proj", q_size, width, at)
        self.norm2 = RMSNorm(f"{name}.post_attention_layernorm", width, eps, at, offset=0.0)
        self.gate_up = Linear(
            [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
            width,
            [config.intermediate_size] * 2,
            at,
            epilogue="silu_mul",
        )
        self.down = Linear(f"{mlp}.down_proj", config.intermediate_size, width, at)
        facts = {"head_dim": self.head_dim, "heads": self.heads, "kv_heads": self.kv_heads}
        self._attention = at.select("causal_attention", **facts)
        self.norm1.feed(self.qkv)
        self.norm2.feed(self.gate_up)

    def project(
        self, x: Tensor, y: Tensor | None, layout: TextLayout
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return x + y, and q, k (normed and rotated) and v of it, packed [M, heads, head_dim]."""
        if y is None:
            n = self.norm1(x)
        else:
            x, n = self.norm1(x, y)
        joined = self.qkv(n).view(1, -1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = joined.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        cos, sin = layout.cos[None], layout.sin[None]
        return x, self.q_norm(q, cos, sin)[0], self.k_norm(k, cos, sin)[0], v[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: TextLayout) -> Tensor:
        """Return attention [M, heads * head_dim]: every token over its row up to itself."""
        scale, size = self.head_dim**-0.5, layout.rows * layout.longest
        places = (layout.rows, layout.longest)
        if layout.dense:
            mixed: Tensor = self._attention(
                *(part.reshape(*places, *part.shape[1:]) for part in (q, k, v)), scale
            )
            return mixed.flatten(2).flatten(0, 1)
        # Padding stands behind a row's tokens, so that no token of its own sees it.
        padded = [part.new_zeros(size + 1, *part.shape[1:]) for part in (q, k, v)]
        for part, buffer in zip((q, k, v), padded, strict=True):
            buffer.index_copy_(0, layout.slots, part)
        mixed = self._attention(
            *(buffer[:-1].view(*places, *buffer.shape[1:]) for buffer in padded), scale
        )
        # padding tokens read the last place; nobody reads them
        flat = mixed.flatten(2).flatten(0, 1)
        return flat.index_select(0, layout.slots.clamp(max=size - 1))

    def finish(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + y (None = nothing), and the MLP's result, which is still to be added."""
        if y is None:
            n = self.norm2(x)
        else:
            x, n = self.norm2(x, y)
        return x, self.down(self.gate_up(n))


class TextStack(nn.Module):
    """Token embedding and the first layers of the decoder; no final norm, no output head.

    num_layers: how many layers exist; None = all.
    embedding_in_file: the token table stays in the checkpoint's file, where device and dtype fit.

    >>> import torch
    >>> from phyai.backbones.qwen3_vl import Qwen3VLTextConfig, TextStack, text_layout
    >>> from phyai.kernels import KernelTable
    >>> from phyai.layers import Placement
    >>> config = Qwen3VLTextConfig(16, 64, 2, 4, 2, 16, 96, (4, 2, 2))
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> stack = TextStack("language_model", config, 1, at)
    >>> layout = text_layout([torch.tensor([1, 2, 3])], [[]], config, image_token_id=9)
    >>> stack(stack.inputs(layout), layout).shape
    torch.Size([3, 64])
    """

    def __init__(
        self,
        name: str,
        config: Qwen3VLTextConfig,
        num_layers: int | None,
        at: Placement,
        *,
        embedding_in_file: bool = False,
    ) -> None:
        super().__init__()
        count = config.num_hidden_layers if num_layers is None else num_layers
        if not 0 <= count <= config.num_hidden_layers:
            raise ConfigError(
                f"num_layers must be 0 to {config.num_hidden_layers}; got {count}. Correct it."
            )
        self.config, self.dtype = config, at.dtype
        self.embedding = claim(
            at.parameter(config.vocab_size, config.hidden_size),
            f"{name}.embed_tokens.weight",
            loader=mapped if embedding_in_file else None,
        )
        self.layers = nn.ModuleList(
            TextLayer(f"{name}.layers.{i}", config, at) for i in range(count)
        )

    def embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings [..., W] of token ids."""
        return nn.functional.embedding(ids, self.embedding)

    def inputs(self, layout: TextLayout, images: Tensor | None = None) -> Tensor:
        """Return the first layer's input [M, W]; images [V, W] in place of the image tokens."""
        embedded = self.embed(layout.token_ids)
        if images is None:
            return embedded
        return torch.cat([images.to(self.dtype), embedded]).index_select(0, layout.order)

    def forward(
        self,
        x: Tensor,
        layout: TextLayout,
        deepstack: Sequence[Tensor] = (),
        *,
        record: Record | None = None,
        keep_kv: KeepKV | None = None,
    ) -> Tensor:
        """Return the last layer's output [M, W] of inputs x [M, W], without a final norm.

        deepstack: per layer, from the first, features [V, W] to add at the image tokens.
        record: gets ``layer_<i>_out``, before deepstack is added.
        """
        zero = x.new_zeros(1, x.shape[1])
        y: Tensor | None = None
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, TextLayer)
            x, q, k, v = layer.project(x, y, layout)
            if keep_kv is not None:
                keep_kv(i, k, v)
            x, y = layer.finish(x, layer.out(layer.attend(q, k, v, layout)))
            if record is not None:
                record(f"layer_{i}_out", x + y)
            if i < len(deepstack):
                added = torch.cat([deepstack[i].to(x.dtype), zero])
                x, y = x + y + added.index_select(0, layout.taps), None
        return x if y is None else x + y

    def isolated(self, x: Tensor) -> Tensor:
        """Return the output [n, W] for tokens that attend to nothing: only the MLPs are left."""
        y: Tensor | None = None
        for layer in self.layers:
            assert isinstance(layer, TextLayer)
            x, y = layer.finish(x, y)
        return x if y is None else x + y
