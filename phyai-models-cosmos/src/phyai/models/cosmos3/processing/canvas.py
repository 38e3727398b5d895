"""The canvas of action requests: sizes by tier, aspect labels, resizing and padding into it.

Sizes are (height, width) in pixels. Frames are never enlarged; what they leave free at the right
and at the bottom is a reflection of them, and is cut off the latents again.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional

from phyai.adapter import is_integer
from phyai.errors import RequestError
from phyai.models.cosmos3.processing.frames import Pixels

Size: TypeAlias = tuple[int, int]

LABELS = ("1,1", "4,3", "3,4", "16,9", "9,16")
"""Aspect labels, width before height, in the order of every tier."""
TIERS = MappingProxyType(
    {
        "256": ((256, 256), (256, 320), (320, 256), (192, 320), (320, 192)),
        "480": ((640, 640), (544, 736), (736, 544), (480, 832), (832, 480), (768, 512)),
        "704": ((960, 960), (832, 1088), (1088, 832), (704, 1280), (1280, 704)),
        "720": ((960, 960), (832, 1104), (1104, 832), (720, 1280), (1280, 720)),
        "768": ((1024, 1024), (880, 1184), (1184, 880), (768, 1360), (1360, 768)),
    }
)
"""Tier -> canvas sizes, one per label; tier 480 has one more, "2,3"."""
_LABEL_OF = {
    size: label
    for sizes in TIERS.values()
    for size, label in zip(sizes, (*LABELS, "2,3"), strict=False)
}


@dataclass(frozen=True, slots=True)
class Canvas:
    """Where a frame lies: content of (content_height, content_width) at the top left.

    >>> canvas = canvas_of(540, 640, 480)
    >>> canvas.image_size, canvas.aspect, canvas.latent_size()
    ((544, 736, 540, 640), '4,3', (33, 40))
    """

    height: int
    width: int
    content_height: int
    content_width: int

    @property
    def image_size(self) -> tuple[int, int, int, int]:
        """Return canvas height and width, then content height and width."""
        return self.height, self.width, self.content_height, self.content_width

    @property
    def aspect(self) -> str:
        """Return the label of the canvas, such as "4,3"."""
        return aspect_label(self.height, self.width)

    def latent_size(self, scale: int = 16) -> Size:
        """Return height and width of the content in latents of ``scale`` pixels each."""
        return max(self.content_height // scale, 1), max(self.content_width // scale, 1)


def tier_sizes(tier: Any, name: str = "resolution_tier") -> tuple[Size, ...]:
    """Return the sizes of a tier given as 480 or "480".  name: what the caller gave it as.

    Raises: RequestError listing the tiers.
    """
    label = str(int(tier)) if is_integer(tier) else tier
    if not isinstance(label, str) or label not in TIERS:
        raise RequestError(
            f"{name} must be one of {', '.join(TIERS)}; got {tier!r}. Pick one of them."
        )
    return TIERS[label]


def aspect_label(height: int, width: int) -> str:
    """Return the label of a size: its tier's own, else the nearest by width / height.

    >>> aspect_label(544, 736), aspect_label(48, 64), aspect_label(720, 1280)
    ('4,3', '4,3', '16,9')
    """
    known = _LABEL_OF.get((int(height), int(width)))
    if known is not None:
        return known
    ratio = width / height

    def distance(label: str) -> float:
        across, down = label.split(",")
        return abs(int(across) / int(down) - ratio)

    return min(LABELS, key=distance)


def canvas_of(height: int, width: int, tier: Any) -> Canvas:
    """Return the canvas of a tier that is nearest in height / width to a frame, which lies on it.

    Raises: RequestError for an unknown tier.
    """
    ratio = height / width
    tall, wide = min(tier_sizes(tier), key=lambda size: abs(ratio - size[0] / size[1]))
    scale = min(wide / width, tall / height, 1.0)
    # Rounded half up; the limit keeps a line of pixels of a very thin frame.
    return Canvas(tall, wide, max(1, int(scale * height + 0.5)), max(1, int(scale * width + 0.5)))


def fit(frames: Pixels, canvas: Canvas) -> Pixels:
    """Return frames on their canvas.

    Shapes: uint8 [..., height, width, 3] -> uint8 [..., canvas.height, canvas.width, 3].
    """
    content = resize(frames, (canvas.content_height, canvas.content_width))
    below = canvas.height - canvas.content_height
    right = canvas.width - canvas.content_width
    if not below and not right:
        return content
    # A reflection has no pixel of its own edge, so it is at most one smaller than the content.
    whole = below >= canvas.content_height or right >= canvas.content_width
    edges = [(0, 0)] * (content.ndim - 3) + [(0, below), (0, right), (0, 0)]
    return np.pad(content, edges, mode="edge" if whole else "reflect")


def resize(frames: Pixels, size: Size) -> Pixels:
    """Return frames resized by antialiased bicubic interpolation; those of ``size`` as they are."""
    if frames.shape[-3:-1] == size:
        return np.ascontiguousarray(frames)
    out = np.empty((*frames.shape[:-3], *size, 3), dtype=np.uint8)
    flat, into = frames.reshape(-1, *frames.shape[-3:]), out.reshape(-1, *size, 3)
    for frame, target in zip(flat, into, strict=True):  # one at a time: floats of one are large
        levels = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1)[None].float()
        resized = functional.interpolate(
            levels, size=size, mode="bicubic", align_corners=False, antialias=True
        )
        target[...] = resized[0].clamp_(0, 255).round_().permute(1, 2, 0).numpy()
    return out
