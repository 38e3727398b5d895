"""The image tower: SigLIP layers, a window merger between two of them, a last merger.

All patches of a batch go through the linear layers together; each image attends within itself.
Patches are in merge order (see ``vision_layout``), so both mergers are views.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from phyai.layers import LayerNorm, Linear, Placement
from phyai.models.minicpm.weights import PatchWeight
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig, VisionSizes
from phyai.models.minicpm_robot.network.vision_layout import WINDOW, Segments, VisionLayout
from phyai.timers import Profile
from phyai.weights import claim

VLM = "vlm"
"""Prefix of the tower's tensors in a checkpoint."""

LAST_EPS = 1e-6
"""Of the norm in the last merger."""

Record: TypeAlias = Callable[[str, Tensor], None]


class SelfAttention(nn.Module):
    """Projections of one attention, ``<name>.{q,k,v,out}_proj``, all with bias."""

    def __init__(self, name: str, config: VisionSizes, at: Placement) -> None:
        super().__init__()
        width, self.heads, self.head_dim = (
            config.hidden_size,
            config.num_attention_heads,
            config.head_dim,
        )
        legs = [f"{name}.{leg}_proj" for leg in "qkv"]
        self.qkv = Linear(legs, width, [width] * 3, at, bias=True)
        self.out = Linear(f"{name}.out_proj", width, width, at, bias=True)
        facts = {"head_dim": self.head_dim, "heads": self.heads, "kv_heads": self.heads}
        self._dense = at.select("attention", masked=False, **facts)
        self._masked = at.select("attention", masked=True, **facts)

    def windows(self, n: Tensor) -> Tensor:
        """Return the output [T, W] for n [T, W] in which every four neighbours attend."""
        out: Tensor = self.out(self._rows(self._heads(n), WINDOW).flatten(1))
        return out

    def forward(self, n: Tensor, segments: Segments) -> Tensor:
        """Return the output [T, W] for n [T, W] in which each image attends within itself."""
        out: Tensor = self.out(self._images(self._heads(n), segments).flatten(1))
        return out

    def _heads(self, n: Tensor) -> Tensor:
        heads: Tensor = self.qkv(n).view(-1, 3, self.heads, self.head_dim)
        return heads

    def _images(self, qkv: Tensor, segments: Segments) -> Tensor:
        if segments.runs is None:
            return self._padded(qkv, segments)
        parts, first = [], 0
        for count, length in segments.runs:
            part = qkv[first : first + count * length]
            parts.append(self._rows(part, length))
            first += count * length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows(self, qkv: Tensor, length: int) -> Tensor:
        """Return attention [T, H, D] of qkv [T, 3, H, D], every ``length`` tokens by themselves."""
        rows = qkv.view(-1, length, 3, self.heads, self.head_dim)
        out: Tensor = self._dense(*rows.unbind(2), self.head_dim**-0.5)
        return out.flatten(0, 1)

    def _padded(self, qkv: Tensor, segments: Segments) -> Tensor:
        images, longest = segments.key_mask.shape
        size = images * longest
        padded = qkv.new_zeros(size + 1, *qkv.shape[1:])
        padded.index_copy_(0, segments.slots, qkv)
        rows = padded[:-1].view(images, longest, *qkv.shape[1:])
        mask = segments.key_mask
        mixed: Tensor = self._masked(*rows.unbind(2), self.head_dim**-0.5, key_mask=mask)
        # padding tokens read the last place; nobody reads them
        return mixed.flatten(0, 1).index_select(0, segments.slots.clamp(max=size - 1))


class EncoderLayer(nn.Module):
    """x += Attn(LN1(x)); x += fc2(gelu_tanh(fc1(LN2(x)))). Shapes: x [T, W]."""

    def __init__(self, name: str, config: VisionSizes, at: Placement) -> None:
        super().__init__()
        width, inner, eps = config.hidden_size, config.intermediate_size, config.layer_norm_eps
        self.norm1 = LayerNorm(f"{name}.layer_norm1", width, eps, at)
        self.attention = SelfAttention(f"{name}.self_attn", config, at)
        self.norm2 = LayerNorm(f"{name}.layer_norm2", width, eps, at)
        self.fc1 = Linear(f"{name}.mlp.fc1", width, inner, at, bias=True, epilogue="gelu_tanh")
        self.fc2 = Linear(f"{name}.mlp.fc2", inner, width, at, bias=True)

    def forward(self, x: Tensor, y: Tensor | None, segments: Segments) -> tuple[Tensor, Tensor]:
        """Return the new x and what is still to be added to it.

        y: what is still to be added to x; each sum is made together with the norm that reads it.
        """
        x, n = _summed(self.norm1, x, y)
        x, n = self.norm2(x, self.attention(n, segments))
        return x, self.fc2(self.fc1(n))


class WindowMerger(nn.Module):
    """Four patches become one: they attend to each other, then an MLP over all of them together.

    x += Attn(LN(x)) inside the window; out = mean(x) + fc2(gelu_tanh(fc1(LN(x side by side)))).
    """

    def __init__(self, config: VisionSizes, at: Placement) -> None:
        super().__init__()
        name, width, eps = f"{VLM}.vit_merger", config.hidden_size, config.layer_norm_eps
        wide, inner = WINDOW * width, WINDOW * config.intermediate_size
        self.wide = wide
        self.norm1 = LayerNorm(f"{name}.layer_norm1", width, eps, at)
        self.attention = SelfAttention(f"{name}.self_attn", config, at)
        self.norm2 = LayerNorm(f"{name}.pre_norm", wide, eps, at)
        self.fc1 = Linear(f"{name}.linear_1", wide, inner, at, bias=True, epilogue="gelu_tanh")
        self.fc2 = Linear(f"{name}.linear_2", inner, width, at, bias=True)

    def forward(
        self, x: Tensor, y: Tensor | None, see: Callable[[Tensor], None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the means [T / 4, W] of x [T, W] and what is still to be added to them.

        see: told what attention adds, [T, W].
        """
        x, n = _summed(self.norm1, x, y)
        mixed = self.attention.windows(n)
        if see is not None:
            see(mixed)
        x, n = self.norm2(x.view(-1, self.wide), mixed.view(-1, self.wide))
        mean = x.view(len(x), WINDOW, -1).mean(dim=1)
        return mean, self.fc2(self.fc1(n))


class LastMerger(nn.Module):
    """An image token out of four tokens: fc2(gelu_erf(fc1(LN(x side by side))))."""

    def __init__(self, config: VisionSizes, out_features: int, at: Placement) -> None:
        super().__init__()
        name, self.wide = f"{VLM}.resampler.mlp.0", WINDOW * config.hidden_size
        self.norm = LayerNorm(f"{name}.pre_norm", self.wide, LAST_EPS, at)
        self.fc1 = Linear(f"{name}.mlp.0", self.wide, self.wide, at, bias=True, epilogue="gelu_erf")
        self.fc2 = Linear(f"{name}.mlp.2", self.wide, out_features, at, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return [T / 4, out_features] of x [T, W]."""
        out: Tensor = self.fc2(self.fc1(self.norm(x.view(-1, self.wide))))
        return out


class ImageTower(nn.Module):
    """Patch rows [P, C * p * p] float32 -> image tokens [P / merge, text width].

    A patch row is (channel, row, column) of its pixels, flattened; rows of an image are row-major.
    Counts ``vision_calls`` and ``vision_patches``.

    >>> from phyai.kernels import KernelTable
    >>> from phyai.models.minicpm_robot.config import HeadSizes, TextSizes
    >>> from phyai.models.minicpm_robot.network.vision_layout import vision_layout
    >>> vision = VisionSizes(32, 48, 2, 4, image_size=56, insert_layer_id=0)
    >>> text, head = TextSizes(hidden_size=8), HeadSizes(cross_attention_dim=8)
    >>> config = MiniCPMRobotConfig(vision, text, head)
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> tower = ImageTower(config, at, Profile())
    >>> tower(torch.zeros(16, 588), vision_layout([(4, 4)], config)).shape
    torch.Size([1, 8])
    """

    def __init__(self, config: MiniCPMRobotConfig, at: Placement, profile: Profile) -> None:
        super().__init__()
        sizes, name = config.vision, f"{VLM}.vpm"
        self.dtype, self.profile = at.dtype, profile
        skips = config.downsample_mode == "4x"
        self.merge_after = None if skips else sizes.insert_layer_id
        width, side = sizes.hidden_size, sizes.patch_size
        kernel = (sizes.num_channels, side, side)
        self.patch = Linear(
            f"{name}.embeddings.patch_embedding",
            sizes.num_channels * side * side,
            width,
            at,
            bias=True,
            loader=PatchWeight(kernel),
        )
        table = at.parameter(sizes.positions_per_side**2, width)
        self.positions = claim(table, f"{name}.embeddings.position_embedding.weight")
        self.layers = nn.ModuleList(
            EncoderLayer(f"{name}.encoder.layers.{i}", sizes, at)
            for i in range(sizes.num_hidden_layers)
        )
        # Also in mode 4x, which skips it: the checkpoint has it.
        self.windows = WindowMerger(sizes, at)
        self.norm = LayerNorm(f"{name}.post_layernorm", width, sizes.layer_norm_eps, at)
        self.merger = LastMerger(sizes, config.text.hidden_size, at)

    def forward(
        self, patches: Tensor, layout: VisionLayout, record: Record | None = None
    ) -> Tensor:
        """Return the image tokens of patches [n, C * p * p], image after image, row-major.

        layout: with tensors on the tower's device.
        record: is told the batch's own part of ``embeddings``, ``encoder.layers.<i>``,
            ``vit_merger.self_attn_window_order``, ``vit_merger``, ``post_layernorm`` [T, W],
            ``image_features`` [V, text width], and of ``position_ids``, ``window_index``,
            ``window_cu_seqlens``; in row-major order, where the name does not say otherwise.
        """
        count = len(layout.order)
        self.profile.count("vision_calls")
        self.profile.count("vision_patches", count)
        if not count:
            return patches.new_zeros(0, self.merger.fc2.sizes[0], dtype=self.dtype)
        told = None if record is None else _Told(record, layout)
        segments = layout.segments
        x: Tensor = self.patch(patches.index_select(0, layout.order).to(self.dtype))
        y: Tensor | None = self.positions.index_select(0, layout.positions)
        if told is not None:
            x, y = told.sum("embeddings", x, y)
        for i, layer in enumerate(self.layers):
            x, y = layer(x, y, segments)
            if told is not None:
                x, y = told.sum(f"encoder.layers.{i}", x, y)
            if i == self.merge_after:
                x, y = self.windows(x, y, None if told is None else told.windows)
                segments = segments.merged()
                if told is not None:
                    told.merged = True
                    x, y = told.sum("vit_merger", x, y)
        _, n = _summed(self.norm, x, y)
        features: Tensor = self.merger(n)
        if told is not None:
            told("post_layernorm", n)
            told.record("image_features", features[: layout.image_tokens])
        return features


class _Told:
    """Gives a listener the batch's own tokens in row-major order."""

    def __init__(self, record: Record, layout: VisionLayout) -> None:
        self.record, self.merged = record, False
        self._order = {merged: layout.natural(merged) for merged in (False, True)}
        for name, value in layout.official().items():
            record(name, value)

    def __call__(self, name: str, x: Tensor) -> None:
        self.record(name, x.index_select(0, self._order[self.merged]))

    def sum(self, name: str, x: Tensor, y: Tensor | None) -> tuple[Tensor, None]:
        """Tell x + y, and return it as x with nothing to add."""
        total = x if y is None else x + y
        self(name, total)
        return total, None

    def windows(self, x: Tensor) -> None:
        order = self._order[True]
        grouped = x.view(-1, WINDOW, x.shape[-1]).index_select(0, order)
        self.record("vit_merger.self_attn_window_order", grouped.flatten(0, 1))


def _summed(norm: LayerNorm, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x + y and its norm."""
    return (x, norm(x)) if y is None else norm(x, y)
