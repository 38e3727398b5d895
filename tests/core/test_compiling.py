"""Compiled functions, and results the compiler keeps on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.compiling import compiled, own_code, use_disk_cache

ROOT = Path(__file__).parents[2]


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Callable[..., Any]]:
    """Let compiling only count; return the functions that were compiled."""
    made: list[Callable[..., Any]] = []

    def count(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        assert (options["backend"], options["dynamic"], options["fullgraph"]) == (
            "inductor", False, True,
        )  # fmt: skip
        made.append(fn)
        return fn

    monkeypatch.setattr(torch, "compile", count)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return made


def test_whole_functions_of_fixed_shapes_with_a_code_object_each(
    compiles: list[Callable[..., Any]],
) -> None:
    """torch counts recompilations per code object."""
    ready = []
    for factor in range(20):
        ready.append(compiled(lambda x, factor=factor: factor * x))
        del ready[:-1]  # memory that is free again gives its number to the next
        assert ready[0](2) == 2 * factor
    assert len({fn.__code__.co_name for fn in compiles}) == 20


def test_numbers_of_regions_are_not_used_again() -> None:
    names = {own_code(abs).__code__.co_name for _ in range(50)}
    assert len(names) == 50


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PHYAI_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unset afterwards")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert use_disk_cache() == tmp_path / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert use_disk_cache() == Path("/mine")


SECOND_START = """
import json
import torch

torch.set_num_threads(1)
from phyai.compiling import compiled, disk_cache_counts
from phyai.graph import GraphService

x, y, z = torch.randn(8, 32), torch.randn(8, 32), torch.zeros(8, 32)
gate = compiled(lambda x, y: torch.tanh(x) * y)
try:
    with torch.no_grad():
        same = torch.allclose(gate(x, y), torch.tanh(x) * y, atol=1e-6)
except Exception:  # no C++ compiler: the region below says so
    same = True
graphs = GraphService("inductor", "cpu")
graphs.capture("tiny", lambda: z.copy_(torch.sin(x) + y))()
same = same and torch.allclose(z, torch.sin(x) + y, atol=1e-6)
(row,) = graphs.report()
print(json.dumps([same, row.mode, row.cached, *disk_cache_counts()]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    told = []
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_START],
            cwd=ROOT,
            env={**environment, "PHYAI_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    if told[0][1] == "eager":  # a machine without a C++ compiler
        assert [entry[0] for entry in told] == [True, True]
        return
    assert told[0] == [True, "inductor", False, 0, 2]
    assert told[1] == [True, "inductor", True, 2, 0]
    assert (tmp_path / "inductor").is_dir()
