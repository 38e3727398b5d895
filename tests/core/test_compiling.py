"""Compiled element-wise functions, and results the compiler keeps on disk."""

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
from torch import Tensor

from phyai import compiling
from phyai.compiling import MAX_SHAPES, Elementwise, elementwise, use_disk_cache

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


@elementwise
def gate(x: Tensor, y: Tensor, offset: float = 1.0) -> Tensor:
    """Return tanh(x) * y + offset."""
    return torch.tanh(x) * y + offset


def test_once_per_shape_stride_dtype_and_setting(compiles: list[Callable[..., Any]]) -> None:
    x = torch.randn(3, 4)
    gate(x, x)
    torch.testing.assert_close(gate(x + 1, x), torch.tanh(x + 1) * x + 1)
    assert len(compiles) == 1
    gate(x, x, offset=2.0)
    gate(x.t(), x.t())
    gate(x[:2], x[:2])
    gate(x.double(), x.double())
    assert (len(compiles), gate.variants) == (5, 5)
    codes = {fn.__code__.co_name for fn in compiles}
    assert len(codes) == 5  # torch counts recompilations per code object
    assert gate.__doc__ == "Return tanh(x) * y + offset."


def test_too_many_shapes_run_as_they_are(compiles: list[Callable[..., Any]]) -> None:
    double = Elementwise(lambda x: 2 * x)
    for size in range(MAX_SHAPES + 5):
        assert double(torch.ones(size)).tolist() == [2.0] * size
    assert len(compiles) == double.variants == MAX_SHAPES


def test_a_failing_compiler_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def broken(fn: object, options: object = None) -> Callable[..., Any]:
        asked.append(1)

        def run(*args: Any) -> Any:
            raise RuntimeError("no C++ compiler\nlong dump")

        return run

    monkeypatch.setattr(compiling, "compiled", broken)
    double = Elementwise(lambda x: 2 * x)
    for size in (1, 2):
        assert double(torch.ones(size)).tolist() == [2.0] * size
    assert asked == [1]
    assert [r.getMessage() for r in caplog.records] == [
        "<lambda> runs as it is: inductor failed: no C++ compiler"
    ]
    with pytest.raises(ZeroDivisionError):
        Elementwise(lambda x: 1 / 0)(torch.ones(1))


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
from phyai.compiling import disk_cache_counts, elementwise
from phyai.graph import GraphService

@elementwise
def gate(x, y):
    return torch.tanh(x) * y

x, y, z = torch.randn(8, 32), torch.randn(8, 32), torch.zeros(8, 32)
with torch.no_grad():
    same = torch.allclose(gate(x, y), torch.tanh(x) * y, atol=1e-6)
graphs = GraphService("inductor", "cpu")
graphs.capture("tiny", lambda: z.copy_(torch.sin(x) + y))()
same = same and torch.allclose(z, torch.sin(x) + y, atol=1e-6)
(row,) = graphs.report()
print(json.dumps([same, row.mode, row.cached, gate.variants, *disk_cache_counts()]))
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
    assert told[0] == [True, "inductor", False, 1, 0, 2]
    assert told[1] == [True, "inductor", True, 1, 2, 0]
    assert (tmp_path / "inductor").is_dir()
