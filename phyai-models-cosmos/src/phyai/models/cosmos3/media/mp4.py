"""Writes mp4 files: H.264 (or MPEG-4 part 2) video, AAC sound."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np

from phyai.errors import ConfigError
from phyai.models.cosmos3.media.codecs import Encoders, check_encoder, import_av
from phyai.models.cosmos3.media.whole_files import whole_file

SOUND_RATE = 48_000
"""What sound at a rate that AAC does not have is converted to, in samples per second."""
_LARGEST_DENOMINATOR = 1001  # 30000/1001 and its like are the oddest rates in use
_MOST_TICKS = 2**31 - 1
_PLACE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENAMETOOLONG),
)
"""Errors of where a file goes, not of what is encoded."""
_SOUND_BITS = 192_000
_H264 = {"crf": "17", "preset": "medium"}
_BT709 = 1  # in all of FFmpeg's colour enumerations
_LIMITED_RANGE = 1


def write_mp4(
    path: str | Path,
    frames: np.ndarray,
    fps: float,
    *,
    sound: np.ndarray | None = None,
    sound_rate: float | None = None,
) -> Path:
    """Write a video, with its sound if there is any; returns its path. Replaces what was there.

    frames: uint8 [T, height, width, 3] RGB, any size; odd sizes keep full colour resolution,
        which a few players do not show.  fps: frames per second.
    sound: float32 [samples, 1 or 2] in [-1, 1]; written as stereo.  sound_rate: samples per second.
    Raises: MissingDependency, ConfigError (encoders, see ``check_encoder``; arrays of another
        shape; a place that cannot be written to).
    """
    path, encoders = Path(path), check_encoder(sound=sound is not None)
    frames, rate = _checked_frames(frames), _checked_rate(fps)
    waves = None if sound is None else _checked_sound(sound, sound_rate)
    av = import_av()
    with whole_file(path) as partial:
        try:
            with av.open(str(partial), "w", format="mp4", options=_options(rate, waves)) as file:
                _fill(file, frames, rate, waves, encoders)
        except av.FFmpegError as error:
            if isinstance(error, OSError) and error.errno in _PLACE:
                raise  # of the file, which whole_file tells
            raise ConfigError(
                f"video {str(path)!r} must be encodable; got {error} from {encoders.video}. "
                "Try another size or frame rate."
            ) from error
    return path


def _options(rate: Fraction, waves: tuple[np.ndarray, int] | None) -> dict[str, str]:
    """Place the index first, and count time finely enough that no stream's length is rounded."""
    ticks = rate.numerator if waves is None else lcm(rate.numerator, waves[1])
    return {"movflags": "+faststart", "movie_timescale": str(min(ticks, _MOST_TICKS))}


def _fill(
    file: Any,
    frames: np.ndarray,
    rate: Fraction,
    waves: tuple[np.ndarray, int] | None,
    encoders: Encoders,
) -> None:
    """Encode both streams side by side, so that the file can be played while it is read."""
    video = _video_stream(file, frames, rate, encoders.video)
    track = None if waves is None else _SoundTrack(file, *waves, encoders.sound)
    for index, pixels in enumerate(frames):
        if track is not None:
            track.write_until(float(index / rate))
        file.mux(video.encode(_picture(pixels, index, video)))
    if track is not None:
        track.finish()
    file.mux(video.encode(None))


def _video_stream(file: Any, frames: np.ndarray, rate: Fraction, encoder: str) -> Any:
    height, width = frames.shape[1:3]
    h264 = encoder == "libx264"
    stream = file.add_stream(encoder, rate=rate, options=_H264 if h264 else {"qscale": "2"})
    stream.width, stream.height = width, height
    # 4:2:0 halves the colour planes, which H.264 allows for even sizes only.
    stream.pix_fmt = "yuv444p" if h264 and (height % 2 or width % 2) else "yuv420p"
    context = stream.codec_context
    context.time_base = 1 / rate
    context.color_primaries = context.color_trc = context.colorspace = _BT709
    context.color_range = _LIMITED_RANGE
    return stream


def _picture(pixels: np.ndarray, index: int, stream: Any) -> Any:
    picture = import_av().VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
    picture = picture.reformat(format=stream.pix_fmt, dst_colorspace=_BT709)
    picture.pts, picture.time_base = index, stream.codec_context.time_base
    return picture


class _SoundTrack:
    """Feeds a waveform [2, samples] to an encoder, as far as the video has come."""

    def __init__(self, file: Any, wave: np.ndarray, rate: int, encoder: str | None) -> None:
        self._file, self._wave, self._rate = file, wave, rate
        self._stream = file.add_stream(encoder, rate=rate, layout="stereo")
        self._stream.bit_rate = _SOUND_BITS
        self._stream.codec_context.open()
        self._size = self._stream.codec_context.frame_size or 1024
        self._done = 0

    def write_until(self, seconds: float) -> None:
        """Encode whole packets up to this time."""
        while self._done + self._size <= min(seconds * self._rate, self._wave.shape[1]):
            self._encode(self._size)

    def finish(self) -> None:
        """Encode what is left, in packets, the last of which may be short."""
        while (left := self._wave.shape[1] - self._done) > 0:
            self._encode(min(self._size, left))
        self._file.mux(self._stream.encode(None))

    def _encode(self, number: int) -> None:
        part = np.ascontiguousarray(self._wave[:, self._done : self._done + number])
        frame = import_av().AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = self._rate, self._done
        frame.time_base = Fraction(1, self._rate)
        self._done += number
        self._file.mux(self._stream.encode(frame))


def _checked_frames(frames: np.ndarray) -> np.ndarray:
    found = np.asarray(frames)
    if found.dtype != np.uint8 or found.ndim != 4 or found.shape[-1] != 3 or 0 in found.shape:
        raise ConfigError(
            "video must be uint8 [frames, height, width, 3]; got "
            f"{found.dtype} {list(found.shape)}. Convert it."
        )
    return found


def _checked_rate(fps: float) -> Fraction:
    if not 0.01 <= fps <= 1000:
        raise ConfigError(f"fps must be from 0.01 to 1000; got {fps!r}. Choose a frame rate.")
    return Fraction(fps).limit_denominator(_LARGEST_DENOMINATOR)


def _checked_sound(sound: np.ndarray, rate: float | None) -> tuple[np.ndarray, int]:
    """Return the sound as planes [2, samples] float32 at a rate that AAC has."""
    wave = np.asarray(sound, dtype=np.float32)
    good = wave.ndim == 2 and wave.shape[1] in (1, 2) and wave.shape[0] > 0
    if not good or not np.isfinite(wave).all():
        raise ConfigError(
            "sound must be finite float32 [samples, 1 or 2]; got shape "
            f"{list(wave.shape)}. Convert it."
        )
    if rate is None or int(rate) != rate or not 1 <= rate <= 768_000:
        raise ConfigError(
            f"sound_rate must be a whole number of samples per second; got {rate!r}. "
            "Pass the sound's rate."
        )
    planes = np.clip(wave.T, -1.0, 1.0)
    if planes.shape[0] == 1:
        planes = np.repeat(planes, 2, axis=0)
    known = import_av().Codec("aac", "w").audio_rates or [SOUND_RATE]
    if int(rate) in known:
        return np.ascontiguousarray(planes), int(rate)
    return _resampled(np.ascontiguousarray(planes), int(rate)), SOUND_RATE


def _resampled(planes: np.ndarray, rate: int) -> np.ndarray:
    """Return [2, samples] at ``SOUND_RATE``, of the same length in time."""
    av = import_av()
    resampler = av.AudioResampler(format="fltp", layout="stereo", rate=SOUND_RATE)
    parts = [np.zeros((2, 0), np.float32)]
    for frame in _resampling(av, resampler, planes, rate):
        parts.append(frame.to_ndarray())
    joined = np.concatenate(parts, axis=1)
    wanted = round(planes.shape[1] * SOUND_RATE / rate)
    return np.pad(joined[:, :wanted], ((0, 0), (0, max(0, wanted - joined.shape[1]))))


def _resampling(av: Any, resampler: Any, planes: np.ndarray, rate: int) -> Iterator[Any]:
    frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout="stereo")
    frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
    yield from resampler.resample(frame)
    yield from resampler.resample(None)
