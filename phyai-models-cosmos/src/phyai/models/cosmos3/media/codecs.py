"""Which encoders this installation has; asked before anything is computed."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from phyai.errors import ConfigError, MissingDependency

PACKAGE = "phyai-models-cosmos[video]"
VIDEO_ENCODERS = ("libx264", "libopenh264", "mpeg4")
"""In order of preference: H.264 plays everywhere, MPEG-4 part 2 is in every build."""
SOUND_ENCODER = "aac"
_PROBE_SIDE = 64


@dataclass(frozen=True, slots=True)
class Encoders:
    """Names of the encoders an mp4 file is written with; sound is None when not asked for."""

    video: str
    sound: str | None = None


def import_av() -> ModuleType:
    """Return PyAV.

    Raises: MissingDependency naming the package to install.
    """
    try:
        import av
    except ImportError as error:
        raise MissingDependency(
            "mp4 files need PyAV; got an environment without it. "
            f"Install it with `pip install '{PACKAGE}'`."
        ) from error
    return av


def check_encoder(*, sound: bool = False) -> Encoders:
    """Return the encoders for an mp4 file; call it before denoising.

    Raises: MissingDependency without PyAV; ConfigError when its build lacks an encoder.

    >>> from phyai.models.cosmos3.media import check_encoder
    >>> check_encoder(sound=True).sound
    'aac'
    """
    video = next((name for name in VIDEO_ENCODERS if _opens(name)), None)
    if video is None:
        raise ConfigError(
            f"PyAV must have an encoder for video, one of {', '.join(VIDEO_ENCODERS)}; got a build "
            f"without. Install the wheel of PyPI with `pip install '{PACKAGE}'`."
        )
    if not sound:
        return Encoders(video)
    if not _has(SOUND_ENCODER):
        raise ConfigError(
            f"PyAV must have the encoder {SOUND_ENCODER!r} for sound; got a build without. Install "
            f"the wheel of PyPI with `pip install '{PACKAGE}'`, or generate without sound."
        )
    return Encoders(video, SOUND_ENCODER)


def _has(name: str) -> bool:
    av = import_av()
    try:
        av.Codec(name, "w")
    except (av.FFmpegError, ValueError):  # an unknown codec is a ValueError
        return False
    return True


def _opens(name: str) -> bool:
    """Return whether a video encoder is there and starts; some need a library of their own."""
    if not _has(name):
        return False
    av = import_av()
    try:
        context = av.CodecContext.create(name, "w")
        context.width = context.height = _PROBE_SIDE
        context.pix_fmt, context.framerate = "yuv420p", 24
        context.open()
    except (av.FFmpegError, OSError, ValueError):
        return False
    return True
