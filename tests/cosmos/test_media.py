"""Media files: what was written is read back; encoders and places are checked beforehand."""

from __future__ import annotations

import math
import sys
import threading
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phyai.errors import ConfigError, MissingDependency, RequestError
from phyai.models.cosmos3.media import (
    check_encoder,
    check_target,
    codecs,
    read_clip,
    reading,
    write_mp4,
    write_results,
)
from phyai.models.cosmos3.media.whole_files import whole_file
from phyai.types import Media

RATE = 48_000


def clip(frames: int, height: int, width: int) -> np.ndarray:
    """A colour gradient whose blue counts the frames."""
    row, column = np.mgrid[0:height, 0:width]
    red, green = column * 255 // max(width - 1, 1), row * 255 // max(height - 1, 1)
    blues = [np.full((height, width), 20 * index % 256) for index in range(frames)]
    return np.stack([np.stack([red, green, blue], -1) for blue in blues]).astype(np.uint8)


def tone(samples: int, rate: int, channels: int = 2) -> np.ndarray:
    line = 0.5 * np.sin(np.arange(samples) * 2 * np.pi * 110 / rate)
    return np.repeat(line[:, None], channels, axis=1).astype(np.float32)


def psnr(got: np.ndarray, wanted: np.ndarray) -> float:
    assert got.shape == wanted.shape
    error = np.square(got.astype(np.float64) - wanted).mean()
    return 10 * math.log10(255**2 / error)


# ------------------------------------------------------------------ mp4


@pytest.mark.parametrize(
    ("frames", "height", "width", "fps"),
    [(9, 48, 64, 24), (5, 47, 63, 15), (1, 16, 16, 24000 / 1001)],
)
def test_a_video_reads_back(
    tmp_path: Path, frames: int, height: int, width: int, fps: float
) -> None:
    pixels = clip(frames, height, width)
    assert write_mp4(tmp_path / "new/out.mp4", pixels, fps) == tmp_path / "new/out.mp4"
    got = read_clip(tmp_path / "new/out.mp4", sound=True)
    assert got.fps == pytest.approx(fps, abs=1e-9)
    assert psnr(got.frames, pixels) > 30
    assert got.sound is None
    assert got.sound_rate is None


@pytest.mark.parametrize(
    ("samples", "rate", "channels"), [(30_011, RATE, 2), (333, 1000, 1), (30_000, 44_100, 2)]
)
def test_sound_reads_back_at_its_length(
    tmp_path: Path, samples: int, rate: int, channels: int
) -> None:
    sound = tone(samples, rate, channels)
    write_mp4(tmp_path / "out.mp4", clip(5, 32, 48), 8, sound=sound, sound_rate=rate)
    got = read_clip(tmp_path / "out.mp4", sound=True)
    assert got.frames.shape == (5, 32, 48, 3)
    assert got.fps == 8
    assert got.sound is not None
    assert got.sound_rate in (RATE, rate)
    assert got.sound.shape[1] == 2
    assert abs(len(got.sound) / got.sound_rate - samples / rate) <= 1 / got.sound_rate
    if rate == RATE:
        middle = slice(4096, 24_576)
        assert np.abs(got.sound[middle] - sound[middle]).max() < 0.03


def test_the_fallback_encoder_writes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "VIDEO_ENCODERS", ("no_such_encoder", "mpeg4"))
    assert check_encoder().video == "mpeg4"
    pixels = clip(5, 48, 64)
    write_mp4(tmp_path / "out.mp4", pixels, 24)
    assert psnr(read_clip(tmp_path / "out.mp4").frames, pixels) > 28


def test_only_some_frames_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = clip(9, 32, 32)
    path = write_mp4(tmp_path / "out.mp4", pixels, 24)
    whole = read_clip(path).frames
    assert np.array_equal(read_clip(path, frames=4).frames, whole[:4])
    assert np.array_equal(read_clip(path, frames=4, keep="last").frames, whole[-4:])
    assert len(read_clip(path, frames=99).frames) == 9
    monkeypatch.setattr(reading, "MAX_CLIP_BYTES", 5 * 32 * 32 * 3)
    with pytest.raises(RequestError, match="at most 5 frames"):
        read_clip(path)
    with pytest.raises(RequestError, match="at most 5 frames"):
        read_clip(path, frames=6)
    assert len(read_clip(path, frames=5, keep="last").frames) == 5
    monkeypatch.setattr(reading, "MAX_SIDE", 16)
    with pytest.raises(RequestError, match="16 pixels a side"):
        read_clip(path, frames=1)


def test_what_is_no_video_is_refused(tmp_path: Path) -> None:
    real = write_mp4(tmp_path / "real.mp4", clip(2, 16, 16), 24)
    (tmp_path / "text.mp4").write_text("no video " * 50)
    (tmp_path / "cut.mp4").write_bytes(real.read_bytes()[:400])
    # A playlist makes a demuxer open what it names.
    (tmp_path / "list.mp4").write_text(f"#EXTM3U\n#EXTINF:1,\n{real}\n#EXT-X-ENDLIST\n")
    (tmp_path / "concat.mp4").write_text(f"ffconcat version 1.0\nfile {real.name}\n")
    for name in ("text.mp4", "cut.mp4", "list.mp4", "concat.mp4"):
        with pytest.raises(RequestError, match="must be a readable video"):
            read_clip(tmp_path / name)
    for name in ("missing.mp4", "."):
        with pytest.raises(RequestError, match="must be a file"):
            read_clip(tmp_path / name)
    with pytest.raises(RequestError, match="at least 1"):
        read_clip(real, frames=0)


# ------------------------------------------------------------------ before anything is computed


def test_without_pyav_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    for call in (
        check_encoder,
        lambda: write_mp4(tmp_path / "a.mp4", clip(1, 16, 16), 24),
        lambda: read_clip(Path(__file__)),
    ):
        with pytest.raises(MissingDependency, match=r"phyai-models-cosmos\[video\]"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_missing_encoders_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SOUND_ENCODER", "no_such_sound")
    assert check_encoder().sound is None
    with pytest.raises(ConfigError, match="no_such_sound"):
        check_encoder(sound=True)
    monkeypatch.setattr(codecs, "VIDEO_ENCODERS", ("no_such_video",))
    with pytest.raises(ConfigError, match="no_such_video"):
        check_encoder()


def test_the_place_is_checked(tmp_path: Path) -> None:
    (tmp_path / "old.mp4").write_text("old")
    (tmp_path / "folder.mp4").mkdir()
    check_target(tmp_path / "new/deep/out.MP4", (".mp4",))
    check_target(tmp_path / "old.mp4", (".mp4",), force=True)
    for name, words in (
        ("out.avi", "must end in .mp4"),
        ("old.mp4", "there already"),
        ("folder.mp4", "a folder"),
        ("old.mp4/out.mp4", "can be written to"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_target(tmp_path / name, (".mp4",))


@pytest.mark.parametrize(
    ("frames", "fps", "sound", "rate", "words"),
    [
        (np.zeros((2, 16, 16, 3), np.float32), 24, None, None, "uint8"),
        (np.zeros((0, 16, 16, 3), np.uint8), 24, None, None, "uint8"),
        (clip(2, 16, 16), 0, None, None, "fps"),
        (clip(2, 16, 16), float("nan"), None, None, "fps"),
        (clip(2, 16, 16), 24, np.zeros((9, 3), np.float32), RATE, "sound"),
        (clip(2, 16, 16), 24, np.full((9, 2), np.nan, np.float32), RATE, "finite"),
        (clip(2, 16, 16), 24, np.zeros((9, 2), np.float32), None, "sound_rate"),
    ],
)
def test_other_arrays_are_refused(
    tmp_path: Path,
    frames: np.ndarray,
    fps: float,
    sound: np.ndarray | None,
    rate: float | None,
    words: str,
) -> None:
    with pytest.raises(ConfigError, match=words):
        write_mp4(tmp_path / "out.mp4", frames, fps, sound=sound, sound_rate=rate)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mp4(tmp_path / "out.mp4", clip(2, 16, 16), 24)
    before = path.read_bytes()
    from phyai.models.cosmos3.media import mp4

    def broken(*_: object) -> object:
        raise OSError("no space left")

    monkeypatch.setattr(mp4, "_picture", broken)
    with pytest.raises(ConfigError, match="no space left"):
        write_mp4(path, clip(3, 16, 16), 24)
    assert [p.name for p in tmp_path.iterdir()] == ["out.mp4"]
    assert path.read_bytes() == before


def test_a_place_the_encoder_cannot_write_to_is_told_as_a_place(tmp_path: Path) -> None:
    path = tmp_path / f"{'x' * 248}.mp4"  # its partial file's name is longer than 255 bytes
    with pytest.raises(ConfigError, match=r"must be writable; got .*too long.*another place"):
        write_mp4(path, clip(2, 16, 16), 24)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"name that is possible there; got .*too long"):
        check_target(tmp_path / f"{'x' * 300}.mp4", (".mp4",))


# ------------------------------------------------------------------ results


def test_results_go_into_the_file_of_their_kind(tmp_path: Path) -> None:
    pixels, sound = clip(5, 32, 32), tone(20_000, RATE)
    video = Media("video", pixels, 24)
    track = Media("sound", sound, RATE)
    write_results(tmp_path / "out.mp4", [video, track])
    got = read_clip(tmp_path / "out.mp4", sound=True)
    assert got.frames.shape == pixels.shape
    assert got.sound is not None
    assert len(got.sound) == len(sound)
    write_results(tmp_path / "out.png", [Media("image", pixels[0])])
    assert np.array_equal(np.asarray(Image.open(tmp_path / "out.png")), pixels[0])
    write_results(tmp_path / "out.wav", [track])
    with wave.open(str(tmp_path / "out.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, RATE, 20_000)
        samples = np.frombuffer(file.readframes(20_000), "<i2").reshape(-1, 2)
    assert np.abs(samples / 32767 - sound).max() <= 0.5 / 32767 + 1e-6


@pytest.mark.parametrize(
    ("name", "results", "words"),
    [
        ("out.png", [Media("video", clip(1, 16, 16), 24)], "must end in .mp4"),
        ("out.mp4", [Media("video", clip(1, 16, 16))], "rate"),
        ("out.mp4", [], "got \\[\\]"),
        ("out.png", [Media("image", clip(1, 16, 16))], "image must be"),
        ("out.wav", [Media("sound", np.zeros(5, np.float32), RATE)], "sound must be"),
    ],
)
def test_other_results_are_refused(
    tmp_path: Path, name: str, results: list[Media], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        write_results(tmp_path / name, results)
    assert list(tmp_path.iterdir()) == []


def test_two_threads_that_write_one_file_leave_a_whole_one(tmp_path: Path) -> None:
    path, both = tmp_path / "clip.bin", threading.Barrier(2, timeout=30)

    def write(content: bytes) -> None:
        with whole_file(path) as partial:
            partial.write_bytes(content)
            both.wait()  # neither is in place yet
            assert partial.read_bytes() == content

    contents = [b"a" * 1000, b"b" * 1000]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, contents)) == [None, None]
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]
