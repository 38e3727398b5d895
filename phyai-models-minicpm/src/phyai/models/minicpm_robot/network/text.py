"""The hybrid decoder: gated delta layers with a full attention layer in between, causal.

Tokens are packed without padding. Everything that treats tokens alone runs on them; convolution,
recurrence and attention run on rows, whose places behind the last token hold zeros: all of them
look back only, so that no token of a row ever meets one.

``record`` gets ``layer_<i>_out`` [M, W], the residual stream behind layer i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phyai.backbones.qwen3_vl import TextLayout
from phyai.errors import ConfigError
from phyai.layers import Linear, Placement, RMSNorm
from phyai.models.minicpm_robot.config import FULL, LINEAR, TextSizes
from phyai.models.minicpm_robot.network.mixers import (
    DeltaMixer,
    GatedAttention,
    MixerState,
    Record,
)
from phyai.models.minicpm_robot.network.text_layout import own_tokens
from phyai.timers import Profile
from phyai.weights import claim, mapped


class HybridLayer(nn.Module):
    """x += mixer(norm1(x)); x += down(silu(gate n) * up n), n = norm2(x). Shapes: x [M, W]."""

    def __init__(self, name: str, kind: str, config: TextSizes, at: Placement) -> None:
        super().__init__()
        if kind not in (LINEAR, FULL):
            raise ConfigError(
                f"layer_types must be {LINEAR!r} or {FULL!r}; got {kind!r}. Correct config.json."
            )
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.norm1 = RMSNorm(f"{name}.input_layernorm", width, eps, at)
        self.mixer: DeltaMixer | GatedAttention
        if kind == LINEAR:
            self.mixer = DeltaMixer(f"{name}.linear_attn", config, at)
        else:
            self.mixer = GatedAttention(f"{name}.self_attn", config, at)
        self.norm2 = RMSNorm(f"{name}.post_attention_layernorm", width, eps, at)
        self.gate_up = Linear(
            [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"],
            width,
            [inner, inner],
            at,
            epilogue="silu_mul",
        )
        self.down = Linear(f"{name}.mlp.down_proj", inner, width, at)
        self.norm1.feed(self.mixer.project)
        self.norm2.feed(self.gate_up)

    def forward(
        self,
        x: Tensor,
        y: Tensor | None,
        layout: TextLayout,
        before: MixerState | None,
        states: list[MixerState] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the new x and what is still to be added to it.

        y: what is still to be added to x; each sum is made together with the norm that reads it.
        """
        if y is None:
            n = self.norm1(x)
        else:
            x, n = self.norm1(x, y)
        keep = None if states is None else states.append
        x, n = self.norm2(x, self.mixer(n, layout, before, keep))
        return x, self.down(self.gate_up(n))


class HybridDecoder(nn.Module):
    """Token embedding, the layers and the final norm.

    name: of the checkpoint tensors, such as ``vlm.llm.model``.
    embedding_in_file: the token table stays in the checkpoint's file, where device and dtype fit.

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> from phyai.models.minicpm_robot.network.text_layout import text_layout
    >>> from phyai.models.minicpm_robot.ops import kernel_rows
    >>> sizes = TextSizes(16, 64, 96, 2, 4, 2, 32, linear_key_head_dim=16,
    ...     linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=2,
    ...     layer_types=("linear_attention", "full_attention"), mrope_section=(2, 1, 1))
    >>> table = KernelTable()
    >>> table.add(kernel_rows())
    >>> at = Placement(table, torch.device("cpu"), torch.float32)
    >>> decoder = HybridDecoder("model", sizes, at, Profile())
    >>> layout = text_layout([torch.tensor([1, 2, 3])], sizes, image_token_id=9)
    >>> decoder(decoder.inputs(layout), layout).shape
    torch.Size([3, 64])
    """

    def __init__(
        self,
        name: str,
        config: TextSizes,
        at: Placement,
        profile: Profile,
        *,
        embedding_in_file: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.profile, self.dtype = config, profile, at.dtype
        self.embedding = claim(
            at.parameter(config.vocab_size, config.hidden_size),
            f"{name}.embed_tokens.weight",
            loader=mapped if embedding_in_file else None,
        )
        self.layers = nn.ModuleList(
            HybridLayer(f"{name}.layers.{i}", kind, config, at)
            for i, kind in enumerate(config.layer_types)
        )
        self.norm = RMSNorm(f"{name}.norm", config.hidden_size, config.rms_norm_eps, at)

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
        *,
        record: Record | None = None,
        before: Sequence[MixerState] | None = None,
        states: list[MixerState] | None = None,
    ) -> Tensor:
        """Return the tokens behind the final norm [M, W] of inputs x [M, W].

        before: the states of rows that these tokens continue, one per layer; those rows were of
            one length, and the layout starts there (see ``text_layout``).
        states: the state of each layer behind these tokens is appended.
        """
        self.profile.count("text_places", layout.rows * layout.longest)
        if layout.dense:
            # Padding stands behind the row: nothing reads it, but its values must be numbers.
            x = torch.where(own_tokens(layout)[:, None], x, 0.0)
        y: Tensor | None = None
        for i, layer in enumerate(self.layers):
            x, y = layer(x, y, layout, None if before is None else before[i], states)
            if record is not None:
                record(f"layer_{i}_out", x + y)
        out: Tensor = self.norm(x) if y is None else self.norm(x, y)[1]
        return out
