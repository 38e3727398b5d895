"""What `phyai run` says of its inputs and outputs, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from phyai.cli import run_report
from phyai.cli.app import main
from tests.core.test_cli_run import PLUGIN, ok, own_checkpoint, refused


def test_cameras_left_out_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "view.png"
    Image.new("RGB", (64, 48)).save(picture)
    out = ok(
        capsys,
        *own_checkpoint("--image", f"base_0_rgb={picture}", "--state", "-0.1,0.2,0,0,1"),
        "--prompt", "pick up the cup",
    )  # fmt: skip
    flat = " ".join(out.split())
    assert "base_0_rgb 64 x 48, left_wrist_0_rgb left out" in flat
    assert "5 values" in flat
    assert "pick up the cup" in flat


@pytest.mark.parametrize(
    ("shape", "text"), [((48, 64, 3), "64 x 48"), ((3, 48, 64), "64 x 48"), ((4,), "")]
)
def test_size_of_an_image(shape: tuple[int, ...], text: str) -> None:
    assert run_report._size(np.zeros(shape)) == text


def test_memory_of_one_of_several_processes_is_called_so() -> None:
    assert run_report._process(1) == "the process (RSS)"
    assert run_report._process(2) == "this process alone (RSS; the model is on 2 ranks)"


@pytest.mark.parametrize(("option", "name"), [("--plot", "chunk.png"), ("--record", "folder")])
def test_places_that_cannot_be_written_are_refused_first(
    option: str,
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phyai.cli.run_setup.prepare", lambda _: pytest.fail("went on"))
    (tmp_path / "file").write_text("")
    err = refused(capsys, "run", "--plugin", PLUGIN, option, str(tmp_path / "file" / name))
    assert f"{option} must name a place to write to" in err
    assert "is a file" in err
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    err = refused(capsys, "run", "--plugin", PLUGIN, option, str(tmp_path / "new" / name))
    assert "is not writable" in err


def test_the_result_is_shown_before_a_picture_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phyai.cli import plots

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(plots, "plot_chunk", full)
    assert main(["run", "--plugin", PLUGIN, "--plot", str(tmp_path / "a.png")]) == 1
    assert "gripper" in capsys.readouterr().out
