"""Generation requests: defaults of every mode, sizes, latent shapes and the length of the sound."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from phyai.errors import RequestError, did_you_mean
from phyai.models.cosmos3.processing.canvas import LABELS, Size, tier_sizes
from phyai.models.cosmos3.processing.checks import check_fps, check_integer

GenerationMode = Literal["t2v", "i2v", "v2v", "t2i"]
MODES: tuple[GenerationMode, ...] = get_args(GenerationMode)
MAX_FRAMES = 4097
MAX_SIDE = 4096


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request of a mode uses when it names nothing else.

    fps: None for stills.  size: (height, width).
    """

    num_steps: int = 35
    guidance_scale: float = 6.0
    flow_shift: float = 10.0
    frames: int = 189
    fps: float | None = 24.0
    size: Size = (720, 1280)


DEFAULTS: MappingProxyType[GenerationMode, Defaults] = MappingProxyType(
    {
        "t2v": Defaults(),
        "i2v": Defaults(),
        "v2v": Defaults(),
        "t2i": Defaults(50, 4.0, 3.0, 1, None, (960, 960)),
    }
)


def mode_of(*, frames: int, image: bool, video: bool) -> GenerationMode:
    """Return the mode of what a request holds.

    frames: to be made; 1 is a still.  image, video: whether it shows one to start from.
    Raises: RequestError for combinations that are no mode.

    >>> mode_of(frames=189, image=True, video=False)
    'i2v'
    """
    if image and video:
        raise RequestError("request must start from an image or a video; got both. Leave one out.")
    if video and frames == 1:
        raise RequestError(
            "num_frames must be above 1 with a video to start from; got 1. Ask for more frames."
        )
    if image and frames == 1:  # its only latent frame would be the given one
        raise RequestError(
            "num_frames must be above 1 with an image to start from; got 1. Ask for more frames, "
            "or leave the image out."
        )
    if frames == 1:
        return "t2i"
    return "i2v" if image else "v2v" if video else "t2v"


def check_frames(frames: Any, temporal: int = 4) -> int:
    """Return a number of frames that latents of ``temporal`` frames can hold: 1 + temporal * k.

    Raises: RequestError naming its neighbours.
    """
    count = check_integer("num_frames", frames, 1, MAX_FRAMES)
    if (count - 1) % temporal:
        below = (count - 1) // temporal * temporal + 1
        raise RequestError(
            f"num_frames must be 1 + {temporal} * k; got {count}. Take {below} or "
            f"{below + temporal}."
        )
    return count


def check_size(height: Any, width: Any, scale: int = 16) -> Size:
    """Return (height, width), multiples of ``scale`` pixels.

    Raises: RequestError naming the nearest.
    """
    sides = []
    for name, value in (("height", height), ("width", width)):
        side = check_integer(name, value, scale, MAX_SIDE)
        if side % scale:
            near = max(scale, round(side / scale) * scale)
            raise RequestError(
                f"{name} must be a multiple of {scale} pixels; got {side}. Take {near}."
            )
        sides.append(side)
    return sides[0], sides[1]


def named_size(tier: Any, aspect: Any = "16,9") -> Size:
    """Return (height, width) of a tier and an aspect label, "16,9" or "16:9".

    Raises: RequestError listing tiers or labels.

    >>> named_size(720), named_size("480", "1:1")
    ((720, 1280), (640, 640))
    """
    sizes = tier_sizes(tier, "resolution")
    label = aspect.replace(":", ",") if isinstance(aspect, str) else aspect
    if label not in LABELS:
        raise RequestError(
            f"aspect_ratio must be one of {', '.join(LABELS)}; got {aspect!r}."
            f"{did_you_mean(str(aspect), LABELS)} Pick one of them."
        )
    return sizes[LABELS.index(label)]


def latent_shape(
    frames: int, height: int, width: int, *, temporal: int = 4, scale: int = 16
) -> tuple[int, int, int]:
    """Return frames, height and width of the latents of a clip.

    >>> latent_shape(33, 480, 832)
    (9, 30, 52)
    """
    return (frames - 1) // temporal + 1, height // scale, width // scale


def sound_frames(frames: int, fps: float, *, sampling_rate: int = 48_000, hop: int = 1920) -> int:
    """Return the latent frames of a clip's sound: its whole samples, rounded up to whole hops.

    >>> sound_frames(189, 24.0)
    197
    """
    return max(1, math.ceil(sound_samples(frames, fps, sampling_rate) / hop))


def sound_samples(frames: int, fps: float, sampling_rate: int) -> int:
    """Return the whole samples of a sound that is as long as a clip.

    >>> sound_samples(41, 5.0, 48_000)  # in floats 41 / 5 * 48000 is a little less
    393600
    """
    return int(round(frames * sampling_rate / check_fps(fps), 6))
