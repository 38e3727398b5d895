"""Reads video files, also those a client sends: known containers only, sizes limited first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phyai.errors import RequestError
from phyai.models.cosmos3.media.codecs import import_av
from phyai.models.cosmos3.processing.frames import MAX_CLIP_BYTES, MAX_SIDE

MAX_SCANNED_FRAMES = 200_000
"""Frames that are decoded at most to find the end of a file."""
MAX_SOUND_SECONDS = 3600
# Playlists and the like would make the demuxer open what else they name.
_CONTAINERS = "mov,mp4,matroska,webm,avi"
_UNREADABLE = "file must be a readable video; got {error}. Convert it to mp4 (H.264)."


@dataclass(frozen=True)
class Clip:
    """What a video file holds.

    frames: uint8 [T, height, width, 3].  fps: None when the file does not say.
    sound: float32 [samples, channels], None without or when not asked for.
    """

    frames: np.ndarray
    fps: float | None
    sound: np.ndarray | None = None
    sound_rate: int | None = None


def read_clip(
    path: str | Path,
    *,
    frames: int | None = None,
    keep: Literal["first", "last"] = "first",
    sound: bool = False,
) -> Clip:
    """Return the frames of a video file, upright, in the order they are shown.

    frames: how many, of its beginning or its end (``keep``); None = all.  A file with fewer gives
        what it has.
    Raises: MissingDependency without PyAV; RequestError for what is no video, is longer or larger
        than the limits, or is damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise RequestError(f"video must be a file; got {str(path)!r}. Check the path.")
    if frames is not None and frames < 1:
        raise RequestError(f"frames of a video must be at least 1; got {frames}. Ask for some.")
    av = import_av()
    try:
        with _opened(av, path) as file:
            found, fps = _frames(file, path, frames, keep)
        wave, rate = None, None
        if sound:
            with _opened(av, path) as file:
                wave, rate = _sound(file, path)
    except (av.FFmpegError, OSError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{str(path)!r}: {_UNREADABLE.format(error=error)}") from error
    return Clip(found, fps, wave, rate)


def _opened(av: Any, path: Path) -> Any:
    limits = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}
    return av.open(str(path.absolute()), options=limits)


def _frames(
    file: Any, path: Path, wanted: int | None, keep: str
) -> tuple[np.ndarray, float | None]:
    if not file.streams.video:
        raise RequestError(f"{str(path)!r} must hold a video; got none. Pass another file.")
    stream = file.streams.video[0]
    if stream.codec_context is None:
        raise RequestError(f"{str(path)!r}: {_UNREADABLE.format(error='an unknown codec')}")
    width, height = stream.codec_context.width, stream.codec_context.height
    if not 1 <= max(width, height) <= MAX_SIDE:
        raise RequestError(
            f"{str(path)!r} must have frames of at most {MAX_SIDE} pixels a side; got "
            f"{width} x {height}. Make them smaller."
        )
    limit = MAX_CLIP_BYTES // max(width * height * 3, 1)
    if wanted is not None and wanted > limit:
        raise RequestError(_too_long(path, wanted, limit))
    kept: deque[np.ndarray] = deque(maxlen=wanted)
    for number, picture in enumerate(file.decode(stream), 1):
        if number > (MAX_SCANNED_FRAMES if wanted is not None else limit):
            raise RequestError(_too_long(path, number, limit))
        if (picture.width, picture.height) != (width, height):
            raise RequestError(
                f"{str(path)!r} must have frames of one size; got {picture.width} x "
                f"{picture.height} after {width} x {height}. Convert it."
            )
        kept.append(_upright(picture))
        if number == wanted and keep == "first":
            break
    if not kept:
        raise RequestError(f"{str(path)!r} must hold frames; got an empty video.")
    rate = stream.average_rate or stream.guessed_rate
    return np.stack(kept), float(rate) if rate else None


def _upright(picture: Any) -> np.ndarray:
    """Return the pixels, turned as the file asks for; phones store frames as the sensor lies."""
    pixels = picture.to_ndarray(format="rgb24")
    turns = round(picture.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _sound(file: Any, path: Path) -> tuple[np.ndarray | None, int | None]:
    if not file.streams.audio:
        return None, None
    stream = file.streams.audio[0]
    if stream.codec_context is None:
        return None, None
    rate = int(stream.rate)
    parts = list(_waves(file, stream, path, MAX_SOUND_SECONDS * rate))
    joined = np.concatenate(parts, axis=1) if parts else np.zeros((1, 0), np.float32)
    if stream.duration is not None:  # the last packet is filled up with silence
        joined = joined[:, : round(stream.duration * stream.time_base * rate)]
    return np.ascontiguousarray(joined.T), rate


def _waves(file: Any, stream: Any, path: Path, limit: int) -> Iterator[np.ndarray]:
    resampler = import_av().AudioResampler(format="fltp")
    total = 0
    for frame in file.decode(stream):
        for wave in resampler.resample(frame):
            part = wave.to_ndarray()
            total += part.shape[1]
            if total > limit:
                raise RequestError(
                    f"{str(path)!r} must have at most {MAX_SOUND_SECONDS} s of sound; got more. "
                    "Cut it."
                )
            yield part


def _too_long(path: Path, got: int, limit: int) -> str:
    return (
        f"{str(path)!r} must have at most {limit} frames of its size; got {got} or more. Cut it, "
        "or ask for fewer frames."
    )
