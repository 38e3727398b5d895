"""Writes what a request gave: a video with its sound, a picture, or a sound."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from phyai.errors import ConfigError
from phyai.models.cosmos3.media.mp4 import write_mp4
from phyai.models.cosmos3.media.whole_files import whole_file
from phyai.types import Media

VIDEO_SUFFIXES = (".mp4",)
IMAGE_SUFFIXES = (".png",)
SOUND_SUFFIXES = (".wav",)
SUFFIXES = {"video": VIDEO_SUFFIXES, "image": IMAGE_SUFFIXES, "sound": SOUND_SUFFIXES}
"""File endings by the kind of the first result."""


def write_results(path: str | Path, results: Sequence[Media]) -> Path:
    """Write one file: a video (with a sound behind it in the list), an image, or a sound.

    Raises: ConfigError for another combination, a suffix that does not fit, or a place that cannot
        be written to; otherwise as ``write_mp4``.

    >>> import tempfile
    >>> picture = Media("image", np.zeros((2, 3, 3), np.uint8))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_results(Path(folder) / "out.png", [picture]).name
    'out.png'
    """
    path, kinds = Path(path), [media.kind for media in results]
    if kinds not in (["video"], ["video", "sound"], ["image"], ["sound"]):
        raise ConfigError(
            f"results of one file must be a video, with sound or without, an image, or a sound; "
            f"got {kinds}. Write them one by one."
        )
    first = results[0]
    if path.suffix.lower() not in SUFFIXES[first.kind]:
        raise ConfigError(
            f"file of a {first.kind} must end in {' or '.join(SUFFIXES[first.kind])}; got "
            f"{str(path)!r}. Rename it."
        )
    if first.kind == "image":
        return write_png(path, first.data)
    if first.rate is None:
        raise ConfigError(f"{first.kind} must have a rate; got None. Set Media.rate.")
    if first.kind == "sound":
        return write_wav(path, first.data, first.rate)
    sound = results[1] if len(results) > 1 else None
    return write_mp4(
        path,
        first.data,
        first.rate,
        sound=None if sound is None else sound.data,
        sound_rate=None if sound is None else sound.rate,
    )


def write_png(path: str | Path, pixels: np.ndarray) -> Path:
    """Write uint8 [height, width, 3]; returns the path. Replaces what was there.

    Raises: ConfigError for another array, or a place that cannot be written to.
    """
    from PIL import Image

    path, found = Path(path), np.asarray(pixels)
    if found.dtype != np.uint8 or found.ndim != 3 or found.shape[-1] != 3 or 0 in found.shape:
        raise ConfigError(
            f"image must be uint8 [height, width, 3]; got {found.dtype} {list(found.shape)}. "
            "Convert it."
        )
    with whole_file(path) as partial:
        Image.fromarray(np.ascontiguousarray(found)).save(partial, format="PNG")
    return path


def write_wav(path: str | Path, sound: np.ndarray, rate: float) -> Path:
    """Write float [samples, channels] in [-1, 1] as 16-bit PCM; returns the path.

    Raises: ConfigError for another array, or a place that cannot be written to.
    """
    path, found = Path(path), np.asarray(sound, dtype=np.float32)
    if found.ndim != 2 or not 1 <= found.shape[1] <= 8 or not np.isfinite(found).all():
        raise ConfigError(
            f"sound must be finite float32 [samples, channels]; got shape {list(found.shape)}. "
            "Convert it."
        )
    values = np.rint(np.clip(found, -1.0, 1.0) * 32767.0).astype("<i2")
    with whole_file(path) as partial, wave.open(str(partial), "wb") as file:
        file.setnchannels(found.shape[1])
        file.setsampwidth(2)
        file.setframerate(round(rate))
        file.writeframes(values.tobytes())
    return path
