"""`phyai verify`: a golden folder tensor by tensor, or own kernels against the reference ones."""

from __future__ import annotations

import contextlib
import fnmatch
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import console
from phyai.cli.options import DebugOption, JsonOption, RunOptions, engine_options
from phyai.errors import ConfigError, PhyaiError, PluginError

if TYPE_CHECKING:
    from phyai.golden import Comparison
    from phyai.testing.golden import GoldenRunner

NOT_RUN, PASSED, FAILED, ERROR = "not run by this plugin", "ok", "over", "error"


@dataclass(frozen=True)
class Verdict:
    """One run of one case: its status, comparisons, or the error that stopped it."""

    case: str
    label: str
    status: str
    comparisons: tuple[Comparison, ...] = ()
    error: str = ""


@engine_options
def verify(
    wanted: RunOptions,
    golden: Annotated[
        Path | None, typer.Option("--golden", metavar="DIR", help="Folder of golden cases.")
    ] = None,
    case: Annotated[
        str, typer.Option("--case", metavar="GLOB", help="Only cases whose file name matches.")
    ] = "*",
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="reference", help="Compare the kernels in use with the reference."
        ),
    ] = None,
    noises: Annotated[
        int, typer.Option("--noises", min=1, help="Requests to compare, each with its own noise.")
    ] = 20,
    min_cosine: Annotated[
        float,
        typer.Option("--min-cosine", min=-1.0, max=1.0, help="Least cosine of x after any step."),
    ] = 0.999,
    max_abs: Annotated[
        float | None,
        typer.Option("--max-abs", min=0.0, help="Largest error of a result. Default: no limit."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run every case of a golden folder and print each tensor's largest error and its tolerance.

    With --against reference: run a preset or checkpoint with the kernels in use and again with
    the reference ones, and print the largest error and least cosine of x after each solver step.
    Exit code 1 when something is over its tolerance or a case cannot be run.
    """
    if (golden is None) == (against is None):
        raise ConfigError(
            "verify needs one of --golden DIR and --against reference; got "
            f"{'neither' if golden is None else 'both'}. Give exactly one."
        )
    if golden is None:
        from phyai.cli import verify_reference

        limits = verify_reference.Limits(min_cosine, max_abs)
        verify_reference.run(against or "", wanted, noises, limits, json=json)
        return
    if wanted.plugin is None:
        raise ConfigError(
            "--golden needs --plugin PLUGIN, whose cases they are; got none. Add --plugin."
        )
    if wanted.preset or wanted.checkpoint or wanted.args or wanted.settings:
        raise ConfigError(
            "--golden cases choose their own checkpoint and settings; got --preset, --checkpoint, "
            "--arg or --set. Drop them, or use --against reference."
        )
    _verify_golden(wanted.plugin, golden, case, json=json, debug=debug)


def _verify_golden(plugin: str, golden: Path, case: str, *, json: bool, debug: bool) -> None:
    from phyai.plugins import find

    find(plugin)  # a wrong id is answered before torch is imported
    if not golden.is_dir():
        raise ConfigError(f"--golden must name a folder; got {str(golden)!r}. Correct the path.")
    with console.Waiting("importing torch"):
        from phyai.testing.golden import case_files, golden_runner
    found = case_files(golden)
    files = [path for path in found if _matches(path, golden, case)]
    if not files:
        raise ConfigError(
            f"golden folder must hold cases that match {case!r}; got {len(found)} cases in "
            f"{str(golden)!r}, none of which match."
            if found
            else f"golden folder must hold cases (case_*.safetensors); got none in {str(golden)!r}."
        )
    verdicts: list[Verdict] = []
    hidden = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with hidden, golden_runner(plugin) as runner:
        for number, path in enumerate(files):
            with console.Waiting(f"[{number + 1}/{len(files)}] {path.name}"):
                done = run_case(runner, path, golden, debug=debug)
            verdicts += done
            if not json:
                for verdict in done:
                    _print(verdict)
    if json:
        console.print_json(_as_json(plugin, golden, verdicts))
    else:
        print(summary(verdicts))
    if any(verdict.status in (FAILED, ERROR) for verdict in verdicts):
        raise typer.Exit(console.FAILED)


def _matches(path: Path, golden: Path, pattern: str) -> bool:
    relative = path.relative_to(golden).as_posix()
    return any(fnmatch.fnmatch(name, pattern) for name in (path.name, path.stem, relative))


def case_root(path: Path, golden: Path) -> Path:
    """Return the nearest folder above a case, within ``golden``, that holds config.json."""
    folder = path.parent
    while folder != golden and not (folder / "config.json").is_file():
        folder = folder.parent
    return folder


def run_case(runner: GoldenRunner, path: Path, golden: Path, *, debug: bool) -> list[Verdict]:
    """Return one verdict per run of a case; what goes wrong in one case doesn't stop the others."""
    name = path.relative_to(golden).as_posix()
    try:
        results = runner.run(path, case_root(path, golden))
    except PluginError:
        raise
    except Exception as error:
        if debug and not isinstance(error, PhyaiError):
            raise
        return [Verdict(name, path.stem, ERROR, error=console.message(error))]
    verdicts = []
    for result in results:
        status = NOT_RUN if not result.comparisons else PASSED if result.ok else FAILED
        verdicts.append(Verdict(name, result.label, status, result.comparisons))
    return verdicts


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return the last line: cases by status, tensors, and the names of tensors that are over."""
    counts = {
        status: sum(v.status == status for v in verdicts)
        for status in (PASSED, FAILED, ERROR, NOT_RUN)
    }
    tensors = sum(len(v.comparisons) for v in verdicts)
    over = sum(not c.ok for v in verdicts for c in v.comparisons)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    runs = "1 run" if len(verdicts) == 1 else f"{len(verdicts)} runs"
    return f"{runs}: {', '.join(parts)}; {over} of {tensors} tensors over."


def _print(verdict: Verdict) -> None:
    print(f"{verdict.label}: {verdict.status}")
    if verdict.error:
        print(f"  {verdict.error}")
    width = max((len(c.name) for c in verdict.comparisons), default=0)
    for c in verdict.comparisons:
        mark = "" if c.ok else "  OVER"
        kind = "" if c.kind == "abs" else f" {c.kind}"
        print(f"  {c.name:<{width}}  {c.error:9.3g} <= {c.tolerance:<9.3g}{kind}{mark}")


def _as_json(plugin: str, golden: Path, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    return {
        "plugin": plugin,
        "golden": str(golden),
        "ok": not any(v.status in (FAILED, ERROR) for v in verdicts),
        "cases": [
            {
                "case": v.case,
                "label": v.label,
                "status": v.status,
                "error": v.error or None,
                "tensors": [
                    {"name": c.name, "error": c.error, "tolerance": c.tolerance, "kind": c.kind,
                     "ok": c.ok}
                    for c in v.comparisons
                ],
            }
            for v in verdicts
        ],
        "summary": summary(verdicts),
    }  # fmt: skip
