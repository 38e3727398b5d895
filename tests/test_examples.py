"""The scripts in examples/ run as a newcomer runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_cache import share_native

ROOT = Path(__file__).parents[1]


def printed(script: str, folder: Path) -> str:
    """Return what an example prints, run in a folder with a cache of its own."""
    share_native(folder / "cache")
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script)],
        cwd=folder,
        env={**os.environ, "PHYAI_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout


def test_run_pi05_prints_an_action_per_dimension(tmp_path: Path) -> None:
    out = printed("run_pi05.py", tmp_path)
    assert re.match(r"50 actions in \d+ ms", out)
    values = dict(re.findall(r"^ {2}(\w+) +([+-]\d\.\d{3})$", out, flags=re.MULTILINE))
    assert list(values) == ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
    assert any(float(value) != 0.0 for value in values.values())
    assert list((tmp_path / "cache").glob("tiny-pi05-*/model.safetensors"))


@pytest.mark.slow
def test_replicas_split_a_batch(tmp_path: Path) -> None:
    out = printed("replicas.py", tmp_path)
    assert re.match(r"8 rows in \d+ ms; requests per replica: \[1, 1\]\n", out)
    difference = float(out.rsplit(maxsplit=1)[1])
    assert difference < 1e-5
