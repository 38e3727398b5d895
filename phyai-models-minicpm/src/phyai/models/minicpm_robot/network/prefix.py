"""Everything in front of the diffusion transformer: image tower and hybrid decoder.

Only valid tokens are computed; rows are packed one behind the other. The images of all rows go
through the tower as one batch. A request may bring the decoder's output instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phyai.backbones.qwen3_vl import TextLayout
from phyai.cache import Cache
from phyai.layers import Placement
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.network.cross import CrossPlan
from phyai.models.minicpm_robot.network.text import HybridDecoder
from phyai.models.minicpm_robot.network.text_layout import static_layout, text_layout
from phyai.models.minicpm_robot.network.vision import ImageTower
from phyai.models.minicpm_robot.network.vision_layout import VisionLayout, vision_layout
from phyai.timers import Profile
from phyai.types import BufferSpec, Key, Prepared

DECODER = "vlm.llm.model"


@dataclass(frozen=True, slots=True)
class RowShape:
    """Capacities of one row of a cache.

    images; patches: of all its images; image_patches: of its largest image; text: tokens that are
    no image tokens; merge: patches per image token.
    even: every row has ``images`` images of ``image_patches`` patches each.
    features: rows come with the decoder's output; then ``text`` counts all tokens.
    """

    images: int
    patches: int
    image_patches: int
    text: int
    merge: int
    even: bool = False
    features: bool = False

    @classmethod
    def of(cls, key: Key, config: MiniCPMRobotConfig) -> RowShape:
        """Return the capacities of one row of a key's cache."""
        extra, merge = dict(key.extra), config.merge**2
        if extra.get("features", False):
            return cls(0, 0, 0, key.bucket("text"), merge, features=True)
        return cls(
            key.bucket("images"),
            key.bucket("patches"),
            key.bucket("image_patches"),
            key.bucket("text"),
            merge,
            bool(extra.get("even", False)),
        )

    @property
    def image_tokens(self) -> int:
        return self.patches // self.merge

    @property
    def tokens(self) -> int:
        """Largest number of valid tokens."""
        return self.text + self.image_tokens


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What one batch looks like; the layouts' tensors are views of the cache's buffers.

    lens: tokens of each row.  valid: of them together, the first packed ones.
    features: with rows that come with the decoder's output, where its packed tokens stand; else
    the layouts.  cross: of the diffusion transformer.
    """

    lens: tuple[int, ...]
    valid: int
    vision: VisionLayout | None
    text: TextLayout | None
    features: Tensor | None
    cross: CrossPlan | None = None


class Prefix(nn.Module):
    """Image tower and decoder."""

    def __init__(
        self,
        config: MiniCPMRobotConfig,
        at: Placement,
        profile: Profile,
        *,
        embedding_in_file: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.profile = config, profile
        self.vision = ImageTower(config, at.with_role("vision"), profile)
        self.text = HybridDecoder(
            DECODER,
            config.text,
            at.with_role("prefix"),
            profile,
            embedding_in_file=embedding_in_file,
        )

    # ------------------------------------------------------------ host

    def cache_buffers(self, shape: RowShape) -> Mapping[str, BufferSpec]:
        """Return the buffers of one cache, per row."""
        tokens, patches = shape.tokens, shape.patches
        if shape.features:
            return {"features.at": BufferSpec((tokens,), torch.int64)}
        integers = {
            "vision.order": patches,
            "vision.positions": patches,
            "vision.slots": patches,
            "text.token_ids": tokens,
            "text.order": tokens,
            "text.taps": tokens,
            "text.slots": tokens,
        }
        rotary = BufferSpec((tokens, self.config.text.rotary_dim), torch.float32)
        return {
            **{name: BufferSpec((size,), torch.int64) for name, size in integers.items()},
            "text.cos": rotary,
            "text.sin": rotary,
            "vision.key_mask": BufferSpec((shape.images, shape.image_patches), torch.bool),
        }

    def load_plan(
        self, cache: Cache, batch: Prepared, shape: RowShape, *, static: bool
    ) -> PrefixPlan:
        """Put a batch's lists into the cache and return its plan; host side.

        static: pad every list to its bucket, and plan all rows the cache has.
        """
        source = _filled(batch, cache.capacity if static else batch.rows)
        lens = tuple(source["token_len"].tolist())
        valid = sum(lens[: batch.rows])
        if shape.features:
            held = self._features_at(cache, lens, shape, static=static)
            return PrefixPlan(lens, valid, None, None, held)
        rows = [row[:n] for row, n in zip(source["tokens"], lens, strict=True)]
        grids = [_grids(row) for row in source["grids"]]
        vision, text = self._layouts(rows, grids, shape, static=static)
        return PrefixPlan(
            lens,
            valid,
            vision.on(_loaded(cache, "vision", vision.tensors())),
            text.on(_loaded(cache, "text", text.tensors())),
            None,
        )

    def _layouts(
        self,
        rows: Sequence[Tensor],
        grids: Sequence[Sequence[tuple[int, int]]],
        shape: RowShape,
        *,
        static: bool,
    ) -> tuple[VisionLayout, TextLayout]:
        config, count = self.config, len(rows)
        counts = [sum(h * w for h, w in row) for row in grids]
        at = [torch.arange(n) + i * shape.patches for i, n in enumerate(counts)]
        vision = vision_layout([grid for row in grids for grid in row], config)
        vision = vision.placed(torch.cat(at))
        text = text_layout(rows, config.text, config.image_token_id)
        if static:
            patches, images = count * shape.patches, count * shape.images
            vision = vision.padded(patches, images, shape.image_patches, even=shape.even)
            total, seen = count * shape.tokens, count * shape.image_tokens
            text = static_layout(text, total, seen, count, shape.tokens)
        return vision, text

    def _features_at(
        self, cache: Cache, lens: Sequence[int], shape: RowShape, *, static: bool
    ) -> Tensor:
        """Return where the valid tokens of given features stand, packed."""
        places = torch.arange(shape.tokens)
        index = torch.cat([places[:n] + i * shape.tokens for i, n in enumerate(lens)])
        buffer = cache["features.at"].view(-1)
        buffer.zero_()
        buffer[: len(index)].copy_(index)
        return buffer if static else buffer[: len(index)]

    # ------------------------------------------------------------ device

    def encode(self, cache: Cache) -> Tensor:
        """Return the tokens the diffusion transformer attends to, packed [N, W]."""
        plan: PrefixPlan = cache.plan
        if plan.features is not None:
            given = cache.inputs["features"].flatten(0, 1)
            return given.index_select(0, plan.features)
        assert plan.vision is not None
        assert plan.text is not None
        record = self.profile.recorder.active
        with self.profile.stage("vision"):
            pixels = cache.inputs["pixels"].flatten(0, 1)
            images = self.vision(pixels, plan.vision, self._vision_record if record else None)
        with self.profile.stage("text"):
            self.profile.count("text_tokens", len(plan.text.token_ids))
            x = self.text.inputs(plan.text, images)
            see = self._see(plan.valid)
            if see is not None:
                see("inputs_embeds", x)
            features: Tensor = self.text(x, plan.text, record=see)
        if see is not None:
            see("last_hidden_state", features)
        return features

    # ------------------------------------------------------------ recording

    def _vision_record(self, name: str, value: Tensor) -> None:
        self.profile.recorder.put(f"vision.{name}", value)

    def _see(self, count: int) -> Callable[[str, Tensor], None] | None:
        """Return what takes the decoder's tensors: the first ``count`` entries are the batch's.

        The count is read only while somebody listens: a traced region must not depend on it.
        """
        recorder = self.profile.recorder
        if not recorder.active:
            return None
        return lambda name, value: recorder.put(f"text.{name}", value[:count])


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
    missing = rows - batch.rows
    held = {}
    for name in ("tokens", "token_len", "grids"):
        given = batch.tensors.get(name)
        if given is not None:
            more = given[:1].expand(missing, *given.shape[1:])
            held[name] = torch.cat([given, more]) if missing else given
    return held


def _grids(table: Tensor) -> list[tuple[int, int]]:
    """Return the images of one row; absent ones have size 0."""
    return [(h, w) for h, w in table.tolist() if h]
