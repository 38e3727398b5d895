"""Nothing grows over 500 mixed requests: buffers, graphs, tables, tensors, resident memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pi.steady_memory import DISTINCT

ROOT = Path(__file__).parents[2]
WARM = 2
"""Rounds in which allocators and caches of libraries may still grow."""
MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "total", "slack"),
    [
        ("pi05", "exact", 500, 8 * MIB),
        ("pi05", "static", 500, 8 * MIB),
        ("pi0", "exact", 500, 8 * MIB),
        ("pi05", "recorded", 200, 32 * MIB),  # every request records anew: the allocator scatters
    ],
)
def test_nothing_grows_over_500_requests(model: str, backend: str, total: int, slack: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.pi.steady_memory", model, backend, str(total)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout.splitlines()[-1])
    assert len(rounds) == total // DISTINCT
    resident = [entry.pop("rss") for entry in rounds]
    steady = rounds[WARM - 1 :]
    assert steady == [steady[0]] * len(steady)
    assert steady[0]["regions"] == 32  # 16 live caches, least recently used ones leave
    assert resident[-1] - resident[WARM - 1] < slack, resident
