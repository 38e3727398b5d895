"""Pixels a video starts from -> latents of the known frames, once per picture."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

from torch import Tensor

from phyai.cache import Cache
from phyai.known import value_name
from phyai.models.cosmos3.batch import PIXELS
from phyai.models.cosmos3.network.layout import TextPlan
from phyai.models.cosmos3.vae import WanVAE
from phyai.timers import Profile
from phyai.types import Prepared


class LatentMemo(Protocol):
    """What this needs of ``services.memo``."""

    def get(self, key: Any) -> Mapping[str, Tensor] | None: ...
    def put(self, key: Any, tensors: Mapping[str, Tensor]) -> Any: ...


@dataclass(frozen=True, slots=True)
class ClipPlan(TextPlan):
    """A TextPlan, and what each row of the cache shows: a digest of its pixels."""

    clips: tuple[bytes, ...] = ()


class ClipEncoder:
    """Fills the known video's values from input ``pixels`` [B, 3, F, H, W].

    Both branches of a request start from one clip: what the first one encoded the second one, and
    a later request with the same clip, has from the memo.
    """

    def __init__(self, vae: WanVAE, memo: LatentMemo, profile: Profile) -> None:
        self.vae, self.memo, self.profile = vae, memo, profile
        self._digested: tuple[weakref.ref[Tensor], tuple[bytes, ...]] | None = None

    def plan(self, cache: Cache, batch: Prepared) -> None:
        """Add the digests of the batch's clips to the cache's plan; host side."""
        clips = list(self._digests(batch.tensors[PIXELS]))
        clips += clips[:1] * (cache.capacity - len(clips))  # what Cache.load puts there
        texts = {f.name: getattr(cache.plan, f.name) for f in fields(TextPlan)}
        cache.plan = ClipPlan(**texts, clips=tuple(clips))

    def encode(self, cache: Cache) -> None:
        plan: ClipPlan = cache.plan
        into = cache.inputs[value_name("video")]
        found: dict[bytes, Tensor] = {}
        for row, clip in enumerate(plan.clips):
            if clip not in found:
                found[clip] = self._latents(clip, cache.inputs[PIXELS][row], into)
            latents = found[clip]
            into[row, :, : latents.shape[1]].copy_(latents)
        frames = latents.shape[1]
        self.profile.record("vae.latents", into[: cache.rows, :, :frames])

    def _digests(self, pixels: Tensor) -> tuple[bytes, ...]:
        """Return each clip's digest; both branches of a batch show the same tensor."""
        if self._digested is not None and self._digested[0]() is pixels:
            return self._digested[1]
        found = tuple(_digest(clip) for clip in pixels)
        self.profile.count("clip_digests", len(found))
        self._digested = weakref.ref(pixels), found
        return found

    def _latents(self, clip: bytes, pixels: Tensor, into: Tensor) -> Tensor:
        """Return the latents [C, T, h, w] of one clip, from the memo or encoded by itself.

        One at a time: a row must not depend on those beside it.
        """
        key = ("clip", clip, tuple(into.shape[3:]))
        held = self.memo.get(key)
        if held is not None:
            return held["latents"]
        made = self.vae.encode_latents(pixels[None])[0]
        # A canvas is larger than its content; what lies beyond is cut off.
        latents = made[..., : into.shape[3], : into.shape[4]].contiguous()
        self.memo.put(key, {"latents": latents})
        return latents


def _digest(clip: Tensor) -> bytes:
    found = hashlib.sha256(repr(tuple(clip.shape)).encode())
    found.update(clip.contiguous().numpy().data.cast("B"))
    return found.digest()
