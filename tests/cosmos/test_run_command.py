"""`phyai run` for both plugins: files, options, and what is told before any work."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from phyai.cli.app import main
from phyai.errors import MissingDependency
from phyai.models.cosmos3 import result_files
from phyai.models.cosmos3.media import read_clip, write_mp4
from tests.native_cache import share_native

TINY = ("run", "--plugin", "cosmos3", "--option", "num_frames=5", "--option", "num_steps=1")
SMALL = (*TINY, "--option", "height=32", "--option", "width=48")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "phyai-cache"
    share_native(folder)
    monkeypatch.setenv("PHYAI_CACHE", str(folder))
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    return folder


def ok(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert main(list(arguments)) == code
    out, err = capsys.readouterr()
    assert "ms" not in out
    assert "Traceback" not in err
    return err


def test_the_written_video_is_what_was_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "video.mp4"
    text = ok(capsys, *SMALL, "--prompt", "a red cube", "--option", "fps=12", "--out", str(out))
    assert f"media: {out}" in text
    assert "video [5, 32, 48, 3], 12 per second" in text
    clip = read_clip(out, sound=True)
    assert clip.frames.shape == (5, 32, 48, 3)
    assert clip.fps == 12.0
    assert clip.sound is not None
    assert clip.sound.shape == (20_000, 2)  # 5 frames at 12 per second, 48 kHz
    assert clip.sound_rate == 48_000


@pytest.mark.slow
def test_a_still_is_written_as_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "still.png"
    options = ("--option", "num_frames=1", "--seed", "3")
    shape = (*TINY[:3], "--option", "height=32", "--option", "width=48", "--steps", "1")
    text = ok(capsys, *shape, *options, "--out", str(out), "--json")
    assert json.loads(text)["shape"] == [32, 48, 3]
    assert Image.open(out).size == (48, 32)


@pytest.mark.slow
def test_a_video_continues_a_video(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    begin, out = tmp_path / "begin.mp4", tmp_path / "more.mp4"
    write_mp4(begin, np.full((5, 32, 48, 3), 128, np.uint8), 24.0)
    data = json.loads(ok(capsys, *SMALL, "--image", f"video={begin}", "--out", str(out), "--json"))
    assert (data["kind"], data["shape"]) == ("video", [5, 32, 48, 3])
    assert data["sound"]["rate"] == 48_000.0
    assert out.is_file()


def _slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)  # loads the model


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--out", "video.gif"), "must end in .mp4"),
        (("--option", "num_frames=1", "--out", "v.mp4"), "end in .png"),
        (("--option", "fps=0.005", "--out", "v.mp4"), "fps must be in [0.01, 1000]; got 0.005"),
        (("--option", "fps=2000", "--out", "v.mp4"), "fps must be in (0, 1000]; got 2000"),
        (("--option", "frames"), "--option must look like name=value"),
        (("--option", "fps=1", "--option", "fps=2"), "an option once"),
        _slow(("--option", "length=3"), "option must be one this adapter knows; got 'length'"),
        _slow(("--option", "num_frames=6"), "num_frames must be 1 + 4 * k"),
        (("--plot", "chunk.png"), "--plot needs a plugin that returns actions"),
        (("--record", "run"), "--record needs a plugin that returns actions"),
    ],
)
def test_bad_options_are_told(
    arguments: tuple[str, ...],
    match: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = (
        SMALL if "num_frames=1" not in arguments and "num_frames=6" not in arguments else SMALL[:3]
    )
    assert main([*chosen, *arguments]) == 2
    err = capsys.readouterr().err
    assert match in err
    assert "--out" not in arguments or "loading weights" not in err
    assert not list(tmp_path.iterdir())


def test_a_missing_encoder_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*, sound: bool) -> None:
        raise MissingDependency("mp4 files need PyAV; got an environment without it.")

    monkeypatch.setattr(result_files, "check_encoder", absent)
    err = refused(capsys, *SMALL, "--out", str(tmp_path / "v.mp4"), code=3)
    assert "mp4 files need PyAV" in err
    assert "loading weights" not in err


@pytest.mark.slow
def test_a_policy_writes_its_video_only_when_it_is_decoded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "seen.mp4"
    small = ("run", "--plugin", "cosmos3_policy", "--arg", "resolution=256", "--steps", "1")
    small = (*small, "--arg", "chunk_size=8", "--out", str(out))
    assert "needs the argument decode_video" in refused(capsys, *small)
    ok(capsys, *small, "--arg", "decode_video=true")
    assert read_clip(out).frames.shape == (9, 256, 288, 3)


def test_a_plugin_without_media_takes_no_out(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "run", "--plugin", "pi05", "--out", "v.mp4")
    assert "--out needs a plugin that makes media; 'pi05' makes none" in err


@pytest.mark.slow
def test_ranks_run_and_are_described(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, ranks = tmp_path / "video.mp4", ("--set", "parallel.tp_size=2")
    told = json.loads(ok(capsys, *SMALL, "--prompt", "a red cube", *ranks, "--json"))
    assert told["shape"] == [5, 32, 48, 3]
    assert told["parameters"] is None
    text = ok(capsys, *SMALL, "--prompt", "a red cube", *ranks, "--out", str(out))
    assert "device      cpu" in text
    assert read_clip(out).frames.shape == (5, 32, 48, 3)


def test_ranks_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, "bench", "--plugin", "cosmos3", "--set", "parallel.tp_size=2")
    assert "must run in this process; got 2 ranks" in told
