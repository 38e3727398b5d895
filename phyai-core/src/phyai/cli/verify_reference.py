"""`phyai verify --against reference`: the kernels in use and the reference ones, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from phyai.cli import console, run_setup
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.cli.run_setup import RunOptions, Setup
    from phyai.testing.parity import Parity


@dataclass(frozen=True)
class Limits:
    """What passes: the least cosine of x after any step, the largest error of a result."""

    min_cosine: float
    max_abs: float | None


def run(against: str, options: RunOptions, noises: int, limits: Limits, *, json: bool) -> None:
    """Compare, print, and exit with 1 when a limit is passed."""
    if against != "reference":
        raise ConfigError(
            f"--against must be 'reference'; got {against!r}. Use --against reference."
        )
    hidden = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with hidden:
        setup = run_setup.prepare(options)
        parity = _compare(setup, noises)
    ok = parity.ok(limits.min_cosine, limits.max_abs)
    if json:
        console.print_json(as_json(setup, parity, limits))
    else:
        print("\n".join(lines(parity, limits)))
    if not ok:
        raise typer.Exit(console.FAILED)


def _compare(setup: Setup, noises: int) -> Parity:
    request = request_maker(setup)
    with console.Waiting("importing torch"):
        from phyai.engine_config import EngineConfig
        from phyai.testing.parity import against_reference
    config = EngineConfig.from_env(setup.config)
    with console.Waiting(f"running {noises} noises twice") as progress:
        return against_reference(
            setup.plugin, setup.args, config, request, noises=noises, progress=progress
        )


def request_maker(setup: Setup) -> Callable[[int], Any]:
    """Return what makes a request of a seed: the preset's sample, or the plugin's random ones."""
    sample, known = setup.sample, setup.manifest.capabilities.get("options")
    if sample is not None and (known is None or "seed" in known):
        return lambda seed: dataclasses.replace(sample, options={**sample.options, "seed": seed})
    if not setup.manifest.cost:
        raise ConfigError(
            f"plugin {setup.record.id!r} must offer a preset with a sample that takes a seed, or a "
            "cost model that makes requests, to be compared; got neither. Use a preset."
        )
    model = run_setup.load_function(setup.manifest.cost, setup.record)(setup.args)
    return lambda seed: model.request(model.workload(), seed)


def lines(parity: Parity, limits: Limits) -> list[str]:
    """Return the table of steps, the kernels that differ, and the verdict."""
    rows = [("x", "step", "max abs", "cosine", "median", "noise")]
    for entry in parity.steps:
        bad = "" if entry.cosine >= limits.min_cosine else "  OVER"
        rows.append(
            (entry.leaf, str(entry.step), f"{entry.max_abs:.3g}", f"{entry.cosine:.6f}",
             f"{entry.median_cosine:.6f}", f"{entry.noise}{bad}")
        )  # fmt: skip
    text = console.aligned(rows)
    differ = differing(parity)
    for op, (own, reference) in differ.items():
        inside = "none of its own"  # fused into another op
        text.append(f"{op}: {', '.join(own) or inside} against {', '.join(reference) or inside}")
    if not differ:
        text.append("All kernels in use are the reference ones.")
    verdict = "ok" if parity.ok(limits.min_cosine, limits.max_abs) else "over"
    allowed = f"cosine >= {limits.min_cosine:g}"
    if limits.max_abs is not None:
        allowed += f", result's max abs <= {limits.max_abs:g}"
    worst = min(parity.steps, key=lambda entry: _rank(entry.cosine))
    largest = max(entry.max_abs for entry in parity.results)
    text.append(
        f"{verdict}: {parity.noises} noises, worst cosine {worst.cosine:.6f} after step "
        f"{worst.step}, largest error of a result {largest:.3g} ({allowed})."
    )
    return text


def differing(parity: Parity) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return op -> kernels in use and reference kernels, where they are not the same."""
    ops = sorted({*parity.own, *parity.reference})
    pairs = {op: (parity.own.get(op, ()), parity.reference.get(op, ())) for op in ops}
    return {op: pair for op, pair in pairs.items() if pair[0] != pair[1]}


def as_json(setup: Setup, parity: Parity, limits: Limits) -> dict[str, Any]:
    """Return the comparison, JSON-ready."""
    return {
        "plugin": setup.record.id,
        "preset": setup.preset.name if setup.preset else None,
        "checkpoint": setup.checkpoint,
        "dtype": setup.precision or setup.config.device.dtype_name,
        "noises": parity.noises,
        "min_cosine": limits.min_cosine,
        "max_abs": limits.max_abs,
        "ok": parity.ok(limits.min_cosine, limits.max_abs),
        "steps": [dataclasses.asdict(entry) for entry in parity.steps],
        "kernels": {
            op: {"own": list(own), "reference": list(reference)}
            for op, (own, reference) in differing(parity).items()
        },
    }


def _rank(cosine: float) -> float:
    """Return a sort key that puts NaN first."""
    return -2.0 if cosine != cosine else cosine
