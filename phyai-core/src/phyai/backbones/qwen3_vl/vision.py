"""The vision tower: patches of any number of images, packed, with deepstack taps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from phyai.backbones.qwen3_vl.config import Qwen3VLVisionConfig
from phyai.backbones.qwen3_vl.vision_layout import VisionLayout
from phyai.layers import LayerNorm, Linear, Placement
from phyai.weights import Loader, claim

EPS = 1e-6
Record: TypeAlias = Callable[[str, Tensor], None]
"""Takes a packed tensor and its name; of padding it sees whatever stands there."""


@dataclass(frozen=True)
class PatchWeight(Loader):
    """A convolution's weight [out, C, T, p, p] as a matrix [out, C * T * p * p]."""

    kernel: tuple[int, ...]

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (param.shape[0], *self.kernel)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.reshape(param.shape))


class VisionBlock(nn.Module):
    """x += proj(Attn(LN1(x))); x += fc2(gelu_tanh(fc1(LN2(x)))). Shapes: x [N, width]."""

    def __init__(self, name: str, config: Qwen3VLVisionConfig, at: Placement) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads, self.head_dim = config.num_heads, config.head_dim
        self.norm1 = LayerNorm(f"{name}.norm1", width, EPS, at)
        self.qkv = Linear(f"{name}.attn.qkv", width, 3 * width, at, bias=True)
        self.out = Linear(f"{name}.attn.proj", width, width, at, bias=True)
        self.norm2 = LayerNorm(f"{name}.norm2", width, EPS, at)
        self.fc1 = Linear(
            f"{name}.mlp.linear_fc1", width, inner, at, bias=True, epilogue="gelu_tanh"
        )
        self.fc2 = Linear(f"{name}.mlp.linear_fc2", inner, width, at, bias=True)
        self._rope = at.select("apply_rope_fp32", head_dim=self.head_dim)
        facts = {"head_dim": self.head_dim, "heads": self.heads, "kv_heads": self.heads}
        self._dense = at.select("attention", masked=False, **facts)
        self._masked = at.select("attention", masked=True, **facts)

    def forward(self, x: Tensor, y: Tensor | None, layout: VisionLayout) -> tuple[Tensor, Tensor]:
        """Return the new x and what is still to be added to it.

        y: what is still to be added to x; each sum is made together with the norm that reads it.
        """
        if y is None:
            n = self.norm1(x)
        else:
            x, n = self.norm1(x, y)
        heads = self.qkv(n).view(1, -1, 3 * self.heads, self.head_dim)
        turned = self._rope(heads[:, :, : 2 * self.heads], layout.cos[None], layout.sin[None])
        q, k = turned[0].split(self.heads, dim=1)
        mixed = self._attend(q, k, heads[0, :, 2 * self.heads :], layout)
        x, n = self.norm2(x, self.out(mixed.flatten(1)))
        return x, self.fc2(self.fc1(n))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: VisionLayout) -> Tensor:
        """Return attention [N, heads, head_dim], each frame over its own patches."""
        shape = (layout.frames, layout.longest, self.heads, self.head_dim)
        scale = self.head_dim**-0.5
        if layout.dense:
            out: Tensor = self._dense(*(part.reshape(shape) for part in (q, k, v)), scale)
            return out.flatten(0, 1)
        size = layout.frames * layout.longest
        padded = q.new_zeros(3, size + 1, *shape[2:])
        for part, buffer in zip((q, k, v), padded, strict=True):
            buffer.index_copy_(0, layout.slots, part)
        rows = (buffer[:-1].view(shape) for buffer in padded)
        out = self._masked(*rows, scale, key_mask=layout.key_mask).flatten(0, 1)
        # padding patches read the last place; nobody reads them
        return out.index_select(0, layout.slots.clamp(max=size - 1))


class Merger(nn.Module):
    """Features of one image token out of its patches: fc2(gelu(fc1(LN of the patches))).

    wide_norm: the norm is over all patches of a token together, not over each.
    Shapes: x [N, width] -> [N / merge, out_hidden_size].
    """

    def __init__(
        self, name: str, config: Qwen3VLVisionConfig, at: Placement, *, wide_norm: bool
    ) -> None:
        super().__init__()
        self.width, self.wide_norm = config.hidden_size * config.merge, wide_norm
        norm_width = self.width if wide_norm else config.hidden_size
        self.norm = LayerNorm(f"{name}.norm", norm_width, EPS, at)
        self.fc1 = Linear(
            f"{name}.linear_fc1", self.width, self.width, at, bias=True, epilogue="gelu_erf"
        )
        self.fc2 = Linear(f"{name}.linear_fc2", self.width, config.out_hidden_size, at, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.wide_norm:
            n = self.norm(x.view(-1, self.width))
        else:
            n = self.norm(x).view(-1, self.width)
        out: Tensor = self.fc2(self.fc1(n))
        return out


class VisionTower(nn.Module):
    """Patch rows [N, patch_values] float32 -> image tokens [N / merge, out], and deepstack's.

    All patches go through the linear layers together; each frame attends within itself. Rotation,
    norm statistics and softmax are float32 in every precision.

    >>> import torch
    >>> from phyai.backbones.qwen3_vl import Qwen3VLVisionConfig, VisionTower, vision_layout
    >>> from phyai.kernels import KernelTable
    >>> from phyai.layers import Placement
    >>> config = Qwen3VLVisionConfig(2, 32, 4, 48, 64, 64, (0,))
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> tower = VisionTower("visual", config, at)
    >>> merged, taps = tower(torch.zeros(16, 1536), vision_layout([(1, 4, 4)], config))
    >>> merged.shape, len(taps)
    (torch.Size([4, 64]), 1)
    """

    def __init__(self, name: str, config: Qwen3VLVisionConfig, at: Placement) -> None:
        super().__init__()
        self.config, self.dtype = config, at.dtype
        width, side = config.hidden_size, config.patch_size
        kernel = (config.in_channels, config.temporal_patch_size, side, side)
        self.patch = Linear(
            f"{name}.patch_embed.proj",
            config.patch_values,
            width,
            at,
            bias=True,
            loader=PatchWeight(kernel),
        )
        table = at.parameter(config.num_position_embeddings, width)
        self.positions = claim(table, f"{name}.pos_embed.weight")
        self.blocks = nn.ModuleList(
            VisionBlock(f"{name}.blocks.{i}", config, at) for i in range(config.depth)
        )
        self.merger = Merger(f"{name}.merger", config, at, wide_norm=False)
        self.taps = nn.ModuleList(
            Merger(f"{name}.deepstack_merger_list.{i}", config, at, wide_norm=True)
            for i in range(len(config.deepstack_visual_indexes))
        )

    def forward(
        self, patches: Tensor, layout: VisionLayout, record: Record | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the image tokens and the deepstack features of each tap.

        layout: with tensors on the tower's device. record: gets ``block0_in``, ``block_0``,
        ``block_last``, ``deepstack_<j>`` and ``merged``.
        """
        x = self.patch(patches.to(self.dtype)) + self._placed(layout)
        if record is not None:
            record("block0_in", x)
        y: Tensor | None = None
        taps: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x, y = block(x, y, layout)
            heard = record is not None and i in (0, len(self.blocks) - 1)
            if heard or i in self.config.deepstack_visual_indexes:
                x, y = x + y, None
            if record is not None and heard:
                record(f"block_{'last' if i else 0}", x)
            if i in self.config.deepstack_visual_indexes:
                taps.append(self.taps[len(taps)](x))
                if record is not None:
                    record(f"deepstack_{len(taps) - 1}", taps[-1])
        merged: Tensor = self.merger(x if y is None else x + y)
        if record is not None:
            record("merged", merged)
        return merged, taps

    def _placed(self, layout: VisionLayout) -> Tensor:
        """Return the position of each patch [N, width], interpolated in the learned table."""
        count, corners = layout.pos_index.shape
        entries = self.positions.index_select(0, layout.pos_index.view(-1))
        entries = entries.view(count, corners, -1).float()
        return torch.bmm(layout.pos_weight[:, None], entries)[:, 0].to(self.dtype)
