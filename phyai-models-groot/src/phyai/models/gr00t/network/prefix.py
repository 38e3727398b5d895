"""Everything in front of the diffusion transformer: vision tower, language layers, VL attention.

Only valid tokens are computed (see ``plan``); the images of all rows go through the tower as one
batch. The features are the output of the last language layer there is, before the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from phyai.backbones.qwen3_vl import (
    Grid,
    TextLayout,
    TextStack,
    VisionLayout,
    VisionTower,
    text_layout,
    text_positions,
    vision_layout,
)
from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.gr00t.checkpoint import LANGUAGE, VISION
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.plan import BatchPlan, RowShape, plan_batch
from phyai.models.gr00t.network.vl import VLProjection
from phyai.timers import Profile
from phyai.types import BufferSpec, Prepared


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What one batch looks like; the layouts' tensors are views of the cache's buffers.

    valid, patches, image_tokens: how many packed tokens, patches and image tokens, the first ones,
    are the batch's own.  patch_count: packed patches, padding included.
    """

    batch: BatchPlan
    vision: VisionLayout
    text: TextLayout
    valid: int
    patches: int
    image_tokens: int
    patch_count: int


class Prefix(nn.Module):
    """Vision tower, language layers and the head's self-attention over their tokens."""

    def __init__(self, config: GrootConfig, at: Placement, profile: Profile) -> None:
        super().__init__()
        self.config, self.profile = config, profile
        vision, text = config.backbone
        self.vision = VisionTower(VISION, vision, at.with_role("vision"))
        self.text = TextStack(LANGUAGE, text, config.select_layer, at.with_role("prefix"))
        self.vl = VLProjection(config, at.with_role("prefix"), profile)

    # ------------------------------------------------------------ host

    def cache_buffers(self, shape: RowShape) -> Mapping[str, BufferSpec]:
        """Return the cache buffers of one cache, per row."""
        vision, text = self.config.backbone
        tokens, patches = shape.tokens, shape.patches
        integers = {
            "plan.patch_at": (patches,),
            "vision.pos_index": (patches, 4),
            "vision.slots": (patches,),
            "text.token_ids": (tokens,),
            "text.order": (tokens,),
            "text.taps": (tokens,),
            "text.slots": (tokens,),
        }
        floats = {
            "vision.pos_weight": (patches, 4),
            "vision.cos": (patches, vision.head_dim),
            "vision.sin": (patches, vision.head_dim),
            "text.cos": (tokens, text.head_dim),
            "text.sin": (tokens, text.head_dim),
        }
        return {
            **{name: BufferSpec(size, torch.int64) for name, size in integers.items()},
            **{name: BufferSpec(size, torch.float32) for name, size in floats.items()},
            "vision.key_mask": BufferSpec((shape.images, shape.image_patches), torch.bool),
            **self.vl.cache_buffers(shape),
        }

    def load_plan(
        self,
        cache: Cache,
        batch: Prepared,
        shape: RowShape,
        groups: Sequence[str],
        *,
        static: bool,
    ) -> None:
        """Put a batch's lists into the cache; host side, before any captured region."""
        source = _filled(batch, cache.capacity if static else batch.rows)
        tokens, lens = source["tokens"], source["token_len"]
        rows = [row[:length] for row, length in zip(tokens, lens.tolist(), strict=True)]
        grids = [_grids(row) for row in source["grids"]]
        vision, text = self._layouts(rows, grids, shape, static=static)
        counts = [sum(t * h * w for t, h, w in row) for row in grids]
        patch_at = torch.cat([torch.arange(n) + i * shape.patches for i, n in enumerate(counts)])
        packed = len(vision.slots)
        patch_at = torch.cat([patch_at, patch_at.new_zeros(packed - len(patch_at))])
        cache["plan.patch_at"].view(-1)[:packed].copy_(patch_at)
        plan = plan_batch(tokens, lens, self.config.image_token_id, shape, groups, static=static)
        patches = sum(counts[: batch.rows])
        cache.plan = PrefixPlan(
            plan,
            vision.on(_loaded(cache, "vision", vision.tensors())),
            text.on(_loaded(cache, "text", text.tensors())),
            int(lens[: batch.rows].sum()),
            patches,
            patches // self.config.merge,
            packed,
        )
        self.vl.load_plan(cache, plan)
        if self.profile.recorder.active:
            self._record_plan(batch, rows, grids)

    def _layouts(
        self, rows: Sequence[Tensor], grids: Sequence[Sequence[Grid]], shape: RowShape, static: bool
    ) -> tuple[VisionLayout, TextLayout]:
        """Return the layouts of a batch; which of their paths is taken hangs on the key alone."""
        config, count = self.config, len(rows)
        sizes, text_sizes = config.backbone
        vision = vision_layout([grid for row in grids for grid in row], sizes)
        text = text_layout(
            rows,
            grids,
            text_sizes,
            image_token_id=config.image_token_id,
            merge=sizes.spatial_merge_size,
        )
        if static:
            images = (count * shape.patches, count * shape.images, shape.image_patches)
            vision = vision.padded(*images)
            total, seen = count * shape.tokens, count * shape.image_tokens
            text = text.padded(total, seen, count, shape.tokens)
            text = replace(text, dense=count == 1)
        return replace(vision, dense=shape.even), text

    def _record_plan(
        self, batch: Prepared, rows: Sequence[Tensor], grids: Sequence[Sequence[Grid]]
    ) -> None:
        config, own = self.config, batch.rows
        side = config.backbone[0].spatial_merge_size
        positions = text_positions(rows[:own], grids[:own], config.image_token_id, side)
        image = torch.cat(list(rows[:own])) == config.image_token_id
        self.profile.record("text.position_ids", positions)
        self.profile.record("head.image", image)
        self.profile.record("prefix.lens", batch.tensors["token_len"])

    # ------------------------------------------------------------ device

    def encode(self, cache: Cache) -> Tensor:
        """Return the tokens the diffusion transformer attends to, packed [N, W]."""
        plan: PrefixPlan = cache.plan
        with self.profile.stage("vision"):
            merged, taps = self._images(cache)
        with self.profile.stage("text"):
            self.profile.count("text_tokens", len(plan.text.token_ids))
            x = self.text.inputs(plan.text, merged)
            see = self._see("text", plan.valid)
            if see is not None:
                see("inputs_embeds", x)
                see("rope_cos", plan.text.cos)
                see("rope_sin", plan.text.sin)
            features = self.text(x, plan.text, taps, record=see)
            self._put("backbone.features", features, plan.valid)
            if plan.batch.padded is not None:
                features = self._with_padding(cache, features)
        with self.profile.stage("vl"):
            return self._attended(cache, features)

    def _images(self, cache: Cache) -> tuple[Tensor, list[Tensor]]:
        plan: PrefixPlan = cache.plan
        pixels = cache.inputs["pixels"].flatten(0, 1)
        index = cache["plan.patch_at"].view(-1)[: plan.patch_count]
        self.profile.count("vision_calls")
        self.profile.count("vision_patches", plan.patch_count)
        record = self.profile.recorder.active
        return self.vision(  # type: ignore[no-any-return]
            pixels.index_select(0, index), plan.vision, self._see_image(plan) if record else None
        )

    def _with_padding(self, cache: Cache, features: Tensor) -> Tensor:
        """Return the features with one of padding wherever official padding has a token.

        A padding token attends to nothing and nothing sees it before the VL layers, so all of them
        are one.
        """
        ids = torch.full((1,), self.config.pad_token_id, device=features.device)
        padding = self.text.isolated(self.text.embed(ids))
        self._put("backbone.padding", padding, 1)
        order = cache["vl.padded"].view(-1)[: cache.plan.batch.padded.numel()]
        return torch.cat([features, padding]).index_select(0, order)

    def _attended(self, cache: Cache, features: Tensor) -> Tensor:
        plan: PrefixPlan = cache.plan
        count = plan.valid
        if (padded := plan.batch.padded) is not None:
            count = padded.numel() // plan.batch.rows * cache.rows

        def see(name: str, value: Tensor) -> None:
            self._put(f"head.{name}", value, count)

        out: Tensor = self.vl(cache, features, see)
        see("features", out)
        return out

    # ------------------------------------------------------------ recording

    def _put(self, name: str, packed: Tensor, count: int) -> None:
        """Put a packed tensor's own entries into the recorder.

        The count is read only while somebody listens: a traced region must not depend on it.
        """
        if self.profile.recorder.active:
            self.profile.recorder.put(name, packed[:count])

    def _see(self, part: str, count: int) -> Callable[[str, Tensor], None] | None:
        if not self.profile.recorder.active:
            return None
        return lambda name, value: self._put(f"{part}.{name}", value, count)

    def _see_image(self, plan: PrefixPlan) -> Callable[[str, Tensor], None]:
        merged = ("deepstack_", "merged")
        return lambda name, value: self._put(
            f"vision.{name}", value, plan.image_tokens if name.startswith(merged) else plan.patches
        )


def _loaded(cache: Cache, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy host tensors into the buffers of their names; return views of the same sizes."""
    held = {}
    for name, value in tensors.items():
        buffer = cache[f"{part}.{name}"].flatten(0, 1)[: len(value)]
        # an exact layout may be narrower than its bucket
        held[name] = buffer[:, : value.shape[1]] if value.dim() == 2 else buffer
        held[name].copy_(value)
    return held


def _filled(batch: Prepared, rows: int) -> dict[str, Tensor]:
    """Return what a plan reads, for ``rows`` rows: those behind the batch repeat the first."""
    names = ("tokens", "token_len", "grids")
    missing = rows - batch.rows
    if not missing:
        return {name: batch.tensors[name] for name in names}
    return {
        name: torch.cat([t, t[:1].expand(missing, *t.shape[1:])])
        for name in names
        for t in (batch.tensors[name],)
    }


def _grids(table: Tensor) -> list[Grid]:
    """Return the images of one row; absent ones have size 0."""
    return [(t, h, w) for t, h, w in table.tolist() if t]
