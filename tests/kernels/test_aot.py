"""The ahead-of-time check: what it covers, and that it catches what it should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phyai.errors import ConfigError
from phyai.kernels import CATALOGUE, KernelTable, aot
from phyai.kernels.triton.examples import examples
from phyai.kernels.triton_rows import TRITON_ROWS

TRITON = [row for row in CATALOGUE if str(row.fn).startswith("phyai.kernels.triton.")]
REPORT = aot.Report("row", "kernel", "", "bfloat16", 90, "key", registers=40)


def test_every_triton_row_is_compiled_for_every_dtype_and_architecture() -> None:
    found = {(task.row, task.dtype, task.arch) for task in aot.tasks(aot.ARCHS)}
    rows = [row.name for row in TRITON]
    assert {row.name for row in TRITON_ROWS} < set(rows)
    assert found == {(r, d, a) for r in rows for d in aot.DTYPES for a in aot.ARCHS}


def test_examples_are_calls_that_dispatch_gives_to_the_row() -> None:
    table = KernelTable()
    for row in TRITON:
        for example in examples(row.name, torch.bfloat16):
            facts = {**example.facts, "device.arch": "sm90"}
            choice = table.explain_one(row.op, device="cuda", dtype="bfloat16", **facts)
            assert choice.row == row.name, choice


def test_limits() -> None:
    assert aot.excess(REPORT) == ""
    assert "spills 8 bytes" in aot.excess(replace(REPORT, spills=8))
    assert aot.excess(replace(REPORT, shared=200 * 1024)) == ""
    assert aot.excess(replace(REPORT, kernel="attention_split_kernel", spills=8)) == ""
    assert "shared memory" in aot.excess(replace(REPORT, arch=120, shared=100 * 1024))
    assert aot.excess(replace(REPORT, arch=89, shared=99 * 1024)) == ""


def test_the_interpreter_is_refused() -> None:
    """The kernels of this process are interpreted; compiling them would mean nothing."""
    with pytest.raises(ConfigError, match="without TRITON_INTERPRET"):
        aot.check([90], jobs=1, cache=None, match="kv_write")


def test_summary_and_listing_name_every_kernel() -> None:
    reports = [REPORT, replace(REPORT, arch=80, registers=36, spills=4)]
    assert aot.summary(reports).splitlines()[1].split() == ["row", "kernel", "36-40", "0-4", "0"]
    assert "kernel bfloat16 sm80: 36 registers, 4 bytes spilled" in aot.listing(reports)


@pytest.mark.parametrize("text", ["", "[1]", '[{"key": "a", "old": 1}]'])
def test_a_cache_of_another_version_is_dropped(text: str, tmp_path: Path) -> None:
    path = tmp_path / "aot.json"
    path.write_text(text)
    assert aot._read(path) == {}


SCRIPT = """
import sys
from pathlib import Path
from phyai.kernels import aot

cache = Path(sys.argv[1])
args = ["--arch", "90", "--jobs", "1", "--match", "gated_residual", "--cache", str(cache)]
assert aot.main(args) == 0
assert aot.main(args) == 0
aot.SPILL_LIMITS = {"gated_residual_kernel": -1}
assert aot.main([*args, "--list"]) == 1

with aot._environment():
    from phyai.kernels.triton import norm

    norm.warps_of = lambda block: 1
    task = [t for t in aot.tasks([120], ["float32"]) if t.row == "triton.rms_norm"][0]
    report = aot.compile_task(task, {})[0]
print(report.kernel, report.problem)
"""


def test_compiles_caches_and_catches_spills(tmp_path: Path) -> None:
    """In a process of its own: twice the same, with a lower limit, with too few threads."""
    cache = tmp_path / "aot.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(cache)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    totals = [line for line in done.stdout.splitlines() if "launches checked" in line]
    assert totals == [
        "3 launches checked, 3 compiled now, 0 with problems",
        "3 launches checked, 0 compiled now, 0 with problems",
        "3 launches checked, 3 compiled now, 3 with problems",
    ]
    assert "sm90: spills 0 bytes of registers, more than -1" in done.stderr
    assert re.match(r"rms_norm_kernel spills \d{3}", done.stdout.splitlines()[-1])
    entries = json.loads(cache.read_text())
    assert len(entries) == 3  # what passed a limit is not remembered
    assert all(0 < entry["registers"] <= 255 for entry in entries)


PACKAGE = """
from pathlib import Path
import torch
from phyai.kernels import OPTIMIZED, KernelRow
from phyai.kernels.triton.examples import Example

def kernel_rows():
    made = KernelRow("new", "torch.new", abs, reference=True, priority=0)
    other = KernelRow("new", "other.new", "not.there:new", devices=("cuda",), priority=5)
    fast = KernelRow("new", "triton.new", "new_kernels:new", devices=("cuda",), priority=OPTIMIZED)
    return [made, other, fast]

def examples(row, dtype):
    x = torch.empty(50, 64, dtype=dtype, device="meta")
    return [Example("mine", (x, x, x), {})] if row == "triton.new" else []
"""
KERNELS = "from phyai.kernels.triton.modulation import gated_residual as new\n"


@pytest.mark.slow
def test_the_rows_of_a_package_are_compiled_too(tmp_path: Path) -> None:
    """Those with examples, chosen from a table that holds them."""
    (tmp_path / "new_package.py").write_text(PACKAGE)
    (tmp_path / "new_kernels.py").write_text(KERNELS)
    args = ["--rows", "new_package", "--match", "new", "--arch", "90", "--jobs", "1", "--no-cache"]
    done = subprocess.run(
        [sys.executable, "-m", "phyai.kernels.aot", *args, "--list"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines[:-1]] == 3 * [
        ["triton.new", "mine", "gated_residual_kernel"]
    ]
    assert lines[-1].startswith("3 launches checked")
