"""What generation starts from: a still or the frames of a clip, resized to the size asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.nn import functional

from phyai.adapter import is_integer
from phyai.errors import RequestError
from phyai.models.cosmos3.processing.actions import fill_clip
from phyai.models.cosmos3.processing.canvas import Size
from phyai.models.cosmos3.processing.frames import Pixels

Keep = Literal["first", "last"]
KEEPS: tuple[Keep, ...] = get_args(Keep)
FIRST_FRAMES = (0, 1)
"""Latent frames that a clip gives when a request names none."""


def cover(frames: Pixels, size: Size) -> Pixels:
    """Return frames that cover ``size`` (height, width): antialiased bilinear, middle cut out.

    Shapes: uint8 [..., height, width, 3] -> uint8 [..., *size, 3].
    """
    height, width = frames.shape[-3:-1]
    if (height, width) == size:
        return np.ascontiguousarray(frames)
    scale = max(size[1] / width, size[0] / height)
    larger = math.ceil(scale * height), math.ceil(scale * width)
    # Half to even, as Python and the official crop round.
    top, left = (round((have - want) / 2.0) for have, want in zip(larger, size, strict=True))
    out = np.empty((*frames.shape[:-3], *size, 3), dtype=np.uint8)
    flat, into = frames.reshape(-1, *frames.shape[-3:]), out.reshape(-1, *size, 3)
    for frame, target in zip(flat, into, strict=True):  # one at a time: floats of one are large
        levels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
        resized = functional.interpolate(
            levels, size=larger, mode="bilinear", align_corners=False, antialias=True
        )
        cut = resized[0, :, top : top + size[0], left : left + size[1]]
        target[...] = cut.round().clamp_(0, 255).permute(1, 2, 0).numpy()
    return out


def check_indexes(indexes: Any, latent_frames: int) -> tuple[int, ...]:
    """Return the latent frames that are given, sorted; None = the first two, or one of one.

    Raises: RequestError.

    >>> check_indexes(None, 48), check_indexes([1, 0], 48)
    ((0, 1), (0, 1))
    """
    if indexes is None:
        return FIRST_FRAMES[: min(2, latent_frames)]
    found = (
        list(indexes)
        if isinstance(indexes, Iterable) and not isinstance(indexes, (str, bytes))
        else []
    )
    if not found or not all(is_integer(i) and 0 <= i < latent_frames for i in found):
        raise RequestError(
            f"cond_frame_indexes must be integers in [0, {latent_frames}), one at least; got "
            f"{indexes!r}. Name latent frames of this clip."
        )
    return tuple(sorted({int(i) for i in found}))


def check_keep(value: Any) -> Keep:
    """Return which end of a clip is kept.  Raises: RequestError."""
    for known in KEEPS:
        if isinstance(value, str) and value == known:
            return known
    raise RequestError(
        f"condition_video_keep must be first or last; got {value!r}. Pick one of them."
    )


def given_frames(
    clip: Pixels, indexes: tuple[int, ...], *, keep: Keep = "first", temporal: int = 4
) -> Pixels:
    """Return the frames that latents up to the last index are made of: 1 + temporal * index.

    A shorter clip repeats its last frame.  keep: the end of a longer one they are taken from.
    """
    count = 1 + temporal * max(indexes)
    return fill_clip(clip[:count] if keep == "first" else clip[-count:], count)
