"""Compile every Triton kernel that dispatch can choose, for GPUs that are not here.

``python -m phyai.kernels.aot --arch 80,90,100``: per row of the op table, dtype and architecture
the row is chosen, its launcher called on tensors without memory, and each launch it makes is
compiled to machine code. Prints registers, spilled bytes and shared memory; exit code 1 when a
kernel does not compile or passes a limit. Results are cached by what went into them.
``--rows package.module`` adds the kernels of a package: of the rows that ``kernel_rows()`` of that
module returns, those for which ``examples(row_name, dtype)`` returns calls, as
``phyai.kernels.triton.examples`` does for the built-in rows.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from phyai.env import cache_dir
from phyai.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
ARCHS = (80, 87, 89, 90, 100, 110, 120)
SPILL_LIMITS: Mapping[str, int] = {
    "attention_split_kernel": 32,
    "modulated_norm_kernel": 16,
    "int8_linear_kernel": 16,
}
"""Kernel name -> bytes of spill stores and loads that are tolerated; 0 for every other kernel.

The assembler spills a few words of these on some architectures, with registers to spare.
"""
SHARED_LIMITS = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227}
"""KiB of shared memory one program may use, by architecture; 99 for those that are not listed."""

_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_FORMAT = 1  # of the cache

EXAMPLES = "phyai.kernels.triton.examples"


@dataclass(frozen=True, slots=True)
class Task:
    """All kernels of one row, for one dtype and architecture.

    source: the module that names the row, "" for the built-in ones.
    """

    op: str
    row: str
    module: str
    attribute: str
    dtype: str
    arch: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One compiled launch. problem: why it is no good, or empty. key: of what it depends on."""

    row: str
    kernel: str
    label: str
    dtype: str
    arch: int
    key: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    problem: str = ""
    cached: bool = False


def tasks(
    archs: Iterable[int], dtypes: Iterable[str] = DTYPES, sources: Iterable[str] = ()
) -> list[Task]:
    """Return one task per Triton row, dtype and architecture that the row accepts by type.

    sources: modules whose rows come on top, see ``--rows``.
    """
    from phyai.kernels import CATALOGUE
    from phyai.kernels.triton_rows import PACKAGE

    own = [row for row in CATALOGUE if str(row.fn).startswith(f"{PACKAGE}.")]
    rows = [("", row) for row in own]
    for source in sources:
        rows += [(source, row) for row in importlib.import_module(source).kernel_rows()]
    found = []
    for source, row in rows:
        if not isinstance(row.fn, str):
            continue
        module, _, attribute = row.fn.partition(":")
        for arch in archs:
            for dtype in dtypes:
                if dtype in row.dtypes:
                    task = Task(row.op, row.name, module, attribute, dtype, arch, source)
                    found.append(task)
    return found


def compile_task(task: Task, known: Mapping[str, Report]) -> list[Report]:
    """Compile what a task launches; launches whose key is in ``known`` are taken from there."""
    import torch

    from phyai.kernels import KernelTable
    from phyai.kernels.triton.launch import assume, interpreted

    table, calls = KernelTable(), importlib.import_module(task.source or EXAMPLES)
    if task.source:
        table.add(calls.kernel_rows())
    dtype = getattr(torch, task.dtype)
    known = dict(known)
    found: list[Report] = []
    for example in calls.examples(task.row, dtype):
        launcher = getattr(importlib.import_module(task.module), task.attribute)
        facts = {**example.facts, "device.arch": f"sm{task.arch}", "rounding": "free"}
        choice = table.explain_one(task.op, device="cuda", dtype=dtype, **facts)
        if choice.row != task.row:
            why = f"dispatch does not choose it: {choice}"
            found.append(
                Report(task.row, "", example.label, task.dtype, task.arch, "", problem=why)
            )
            continue
        with assume(task.arch, record=True) as launches:
            launcher(*example.args)
        for launch in launches:
            if interpreted(launch.kernel):
                raise ConfigError(
                    "kernels must be imported without TRITON_INTERPRET to be compiled; "
                    f"got {task.module} in this process. Run `python -m phyai.kernels.aot`."
                )
            signature = Signature.of(launch.kernel, launch.args, launch.meta)
            key = signature.key(task.arch)
            report = known.get(key) or signature.compile(task.arch, key)
            known[key] = report
            shown = replace(
                report, row=task.row, label=example.label, dtype=task.dtype, arch=task.arch
            )
            found.append(shown)
    return found


@dataclass(frozen=True)
class Signature:
    """One specialisation of a kernel, as its launch would ask for it."""

    kernel: Any
    types: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], Any]
    options: dict[str, int]

    @classmethod
    def of(cls, kernel: Any, args: Sequence[Any], meta: Mapping[str, Any]) -> Signature:
        """Specialise as a launch does: pointers and integers that are multiples of 16, and ones."""
        names = list(kernel.arg_names)
        options = {name: value for name, value in meta.items() if name not in names}
        values = dict(zip(names, args, strict=False)) | {n: meta[n] for n in names if n in meta}
        types: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for index, name in enumerate(names):
            value = values[name]
            types[name] = "constexpr" if name in meta else _type(value)
            if types[name] == "constexpr":
                constants[(index,)] = value
            elif not isinstance(value, float) and _aligned(value):
                attributes[(index,)] = [["tt.divisibility", 16]]
        return cls(kernel, types, constants, attributes, options)

    def key(self, arch: int) -> str:
        """Return the hash of the source, its helpers, the specialisation and the compiler."""
        import triton

        parts = [_FORMAT, triton.__version__, self.kernel.cache_key, arch]
        parts += [sorted(self.types.items()), sorted(self.constants.items(), key=str)]
        parts += [sorted(self.attributes.items()), sorted(self.options.items())]
        parts.append(SPILL_LIMITS.get(self.kernel.__name__, 0))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def compile(self, arch: int, key: str) -> Report:
        """Compile to machine code and read what the assembler says about it."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(
            fn=self.kernel,
            signature=self.types,
            constexprs=self.constants,
            attrs=self.attributes,
        )
        report = Report("", self.kernel.__name__, "", "", arch, key)
        log = io.StringIO()
        target = GPUTarget("cuda", arch, 32)
        try:
            with contextlib.redirect_stdout(log):
                try:
                    done = triton.compile(source, target=target, options=self.options)
                except (
                    BlockingIOError
                ):  # a loaded machine refused to start the assembler: once more
                    time.sleep(1.0)
                    done = triton.compile(source, target=target, options=self.options)
        except OSError:
            raise  # about this machine, not about the kernel
        except Exception as error:  # every compiler error has its own class
            tail = f"{error}\n{log.getvalue()}".strip()
            return replace(report, problem=f"{type(error).__name__}: {tail[:2000]}")
        used, spilled = _USED.search(log.getvalue()), _SPILLED.search(log.getvalue())
        if used is None or spilled is None:
            return replace(report, problem=f"the assembler said nothing: {log.getvalue()!r}")
        report = replace(
            report,
            registers=int(used.group(1)),
            spills=sum(map(int, spilled.groups())),
            shared=int(done.metadata.shared),
        )
        return replace(report, problem=excess(report))


def excess(report: Report) -> str:
    """Return which limit a compiled kernel passes, or an empty text."""
    spills = SPILL_LIMITS.get(report.kernel, 0)
    if report.spills > spills:
        return f"spills {report.spills} bytes of registers, more than {spills}"
    shared = SHARED_LIMITS.get(report.arch, 99) * 1024
    if report.shared > shared:
        return f"needs {report.shared} bytes of shared memory, more than {shared}"
    return ""


def _type(value: Any) -> str:
    if value is None:
        return "constexpr"
    if isinstance(value, int):
        if value == 1:
            return "constexpr"
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "bool": "i1"}
    name = str(value.dtype).removeprefix("torch.")
    return "*" + names.get(name, name.replace("uint", "u").replace("int", "i"))


def _aligned(value: Any) -> bool:
    address = value if isinstance(value, int) else value.data_ptr()
    return bool(address % 16 == 0)


# ---------------------------------------------------------------- the command


def check(
    archs: Sequence[int],
    *,
    jobs: int,
    cache: Path | None,
    match: str = "",
    sources: Sequence[str] = (),
) -> list[Report]:
    """Compile everything for these architectures in ``jobs`` processes; sorted reports.

    cache: file of what compiled before, rewritten at the end.  match: only rows whose name contains
    it.  sources: as in ``tasks``.  With one job everything happens in this process, which must not
    have imported a kernel yet when TRITON_INTERPRET is set.
    """
    known = _read(cache)
    todo = [task for task in tasks(archs, sources=sources) if match in task.row]
    todo.sort(key=lambda task: task.op != "attention")  # the long ones first
    calls = [(task, known) for task in todo]
    with _environment():
        if jobs == 1:
            reports = _gather(map(_compile, calls), len(calls))
        else:
            with multiprocessing.get_context("spawn").Pool(jobs) as pool:
                reports = _gather(pool.imap_unordered(_compile, calls), len(calls))
    if cache is not None:
        good = {report.key: report for report in reports if not report.problem}
        whole = not match and set(archs) >= set(ARCHS)
        _write(cache, good if whole else {**known, **good})
    return sorted(reports, key=lambda r: (r.row, r.kernel, r.label, r.dtype, r.arch))


def _compile(call: tuple[Task, Mapping[str, Report]]) -> list[Report]:
    return compile_task(*call)


def _gather(results: Iterable[list[Report]], total: int) -> list[Report]:
    """Collect what the processes found, and show on a terminal how far they are."""
    reports: list[Report] = []
    for done, result in enumerate(results, 1):
        reports += result
        if sys.stderr.isatty():
            end = "\n" if done == total else ""
            print(f"\rcompiling kernels: {done} of {total}", end=end, file=sys.stderr, flush=True)
    return reports


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set what the compiler reads from the environment of the worker processes."""
    with tempfile.TemporaryDirectory(prefix="phyai-aot-") as folder:
        wanted = {
            "TRITON_CACHE_DIR": folder,
            "TRITON_ALWAYS_COMPILE": "1",  # what Triton finds in its own cache has no log
            "TRITON_DUMP_PTXAS_LOG": "1",
            "TRITON_DEFAULT_FP_FUSION": "1",
            "TRITON_INTERPRET": "0",
            "OMP_NUM_THREADS": "1",
        }
        before = dict(os.environ)
        os.environ.update(wanted)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _read(path: Path | None) -> dict[str, Report]:
    if path is None or not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return {entry["key"]: Report(**{**entry, "cached": True}) for entry in entries}
    except (ValueError, TypeError, KeyError):
        return {}  # of another version: compile again


def _write(path: Path, reports: Mapping[str, Report]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(json.dumps([asdict(r) for r in reports.values()]), encoding="utf-8")
    part.replace(path)


def summary(reports: Sequence[Report]) -> str:
    """Return one line per kernel and variant, with ranges over dtypes and architectures."""
    groups: dict[tuple[str, str, str], list[Report]] = {}
    for report in reports:
        groups.setdefault((report.row, report.label, report.kernel), []).append(report)
    lines = []
    for (row, label, kernel), group in groups.items():
        registers = _range([report.registers for report in group])
        spills = _range([report.spills for report in group])
        shared = _range([report.shared // 1024 for report in group])
        name = f"{row} ({label})" if label else row
        lines.append(f"{name:<42} {kernel:<26} {registers:>9} {spills:>7} {shared:>7}")
    head = f"{'row':<42} {'kernel':<26} {'registers':>9} {'spilled':>7} {'KiB':>7}"
    return "\n".join([head, *lines])


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def listing(reports: Sequence[Report]) -> str:
    """Return one line per compiled launch."""
    return "\n".join(
        f"{r.row} {r.label or '-'} {r.kernel} {r.dtype} sm{r.arch}: {r.registers} registers, "
        f"{r.spills} bytes spilled, {r.shared} bytes shared"
        for r in reports
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="phyai.kernels.aot", description=__doc__)
    default = ",".join(map(str, ARCHS))
    parser.add_argument("--arch", default=default, help="architectures, such as 80,90")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--rows", action="append", default=[], help="module with more rows")
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument("--list", action="store_true", help="one line per dtype and architecture")
    parser.add_argument("--cache", type=Path, default=cache_dir() / "aot.json")
    parser.add_argument("--no-cache", action="store_true")
    options = parser.parse_args(argv)
    try:
        archs = [int(part) for part in options.arch.split(",")]
    except ValueError:
        raise ConfigError(
            f"--arch must be numbers joined by commas; got {options.arch!r}. Such as {default}."
        ) from None
    if importlib.util.find_spec("triton") is None and sys.platform != "linux":
        print("triton exists for Linux only: nothing to compile here")
        return 0
    cache = None if options.no_cache else options.cache
    reports = check(
        archs, jobs=options.jobs, cache=cache, match=options.match, sources=options.rows
    )
    print(listing(reports) if options.list else summary(reports))
    bad = [report for report in reports if report.problem]
    for r in bad:
        print(f"{r.row} {r.kernel} {r.label} {r.dtype} sm{r.arch}: {r.problem}", file=sys.stderr)
    fresh = sum(not report.cached for report in reports)
    print(f"{len(reports)} launches checked, {fresh} compiled now, {len(bad)} with problems")
    return 1 if bad or not reports else 0


if __name__ == "__main__":
    sys.exit(main())
