"""The scripts in examples/ run as a newcomer runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.native_cache import share_native

ROOT = Path(__file__).parents[1]


def test_run_pi05_prints_an_action_per_dimension(tmp_path: Path) -> None:
    share_native(tmp_path / "cache")
    out = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "run_pi05.py")],
        cwd=tmp_path,
        env={**os.environ, "PHYAI_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    ).stdout
    assert re.match(r"50 actions in \d+ ms", out)
    values = dict(re.findall(r"^ {2}(\w+) +([+-]\d\.\d{3})$", out, flags=re.MULTILINE))
    assert list(values) == ["x", "y", "z", "roll", "pitch", "yaw", "gripper"]
    assert any(float(value) != 0.0 for value in values.values())
    assert list((tmp_path / "cache").glob("tiny-pi05-*/model.safetensors"))
