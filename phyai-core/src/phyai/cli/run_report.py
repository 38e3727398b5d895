"""What `phyai run` prints: header, stage timing, the chunk, peak memory; or one JSON object."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy

from phyai.cli import console
from phyai.types import ActionChunk, Media, Observation

if TYPE_CHECKING:
    from rich.console import Console

    from phyai.cli.run_setup import Setup
    from phyai.engine import Engine

VALUE_WIDTH, MAX_SHOWN = 10, 10


@dataclass(frozen=True)
class Outcome:
    """A finished run. timings: milliseconds per stage, one mapping per repetition.

    ranks: processes that share the model; with several this one need not be one of them.
    """

    setup: Setup
    result: Any
    timings: tuple[Mapping[str, float], ...]
    seed: int | None
    load_s: float
    parameters: int | None
    device: str
    dtype: str
    expects: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 1

    @property
    def timing(self) -> dict[str, float]:
        """The median of each stage over the repetitions after the first, which warms up."""
        kept = self.timings[1:] or self.timings
        return {stage: median(t.get(stage, 0.0) for t in kept) for stage in self.timings[0]}


def count_parameters(engine: Engine) -> int | None:
    """Return the numbers the adapter's modules hold; shared tensors count once.

    None where they are in other processes, each with a part.
    """
    if engine.adapter is None:
        return None
    seen: dict[int, int] = {}
    for module in engine.adapter.dump_targets().values():
        for parameter in module.parameters():
            seen[id(parameter)] = parameter.numel()
    return sum(seen.values())


def peak_rss_bytes() -> int:
    """Return the most memory this process held at once."""
    # ru_maxrss survives exec: it may show the launcher's peak, so /proc goes first.
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def versions(setup: Setup) -> dict[str, str]:
    """Return the versions that decide about the numbers."""
    from importlib import metadata

    from phyai import __version__

    found = {"phyai-core": __version__, "python": platform.python_version()}
    if setup.record.version:
        found[setup.record.dist] = setup.record.version
    for name in ("torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- JSON


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return everything about a run, JSON-ready."""
    setup, result = outcome.setup, outcome.result
    data: dict[str, Any] = {
        "plugin": setup.record.id,
        "preset": setup.preset.name if setup.preset else None,
        "checkpoint": setup.checkpoint,
        "device": outcome.device,
        "dtype": outcome.dtype,
        "seed": outcome.seed,
        "parameters": outcome.parameters,
        "load_s": outcome.load_s,
        "timing": outcome.timing,
        "timings": [dict(timing) for timing in outcome.timings],
        "versions": versions(setup),
        "ranks": outcome.ranks,
        "peak_rss_bytes": peak_rss_bytes(),  # of this process alone
    }
    if isinstance(result, ActionChunk):
        data |= {
            "names": list(result.names),
            "units": list(result.units),
            "control_hz": result.control_hz,
            "actions": result.actions.tolist(),
            "mask": result.mask.tolist(),
            "model_actions": result.model_actions.tolist(),
        }
    else:
        data |= _media(result)
        if result.sound is not None:
            data["sound"] = _media(result.sound)
    return data


def _media(result: Media) -> dict[str, Any]:
    return {"kind": result.kind, "shape": list(result.data.shape), "rate": result.rate}


# ---------------------------------------------------------------- tables


def print_header(outcome: Outcome, request: Observation) -> None:
    """Print what is being run, and on what."""
    from rich.table import Table
    from rich.text import Text

    setup = outcome.setup
    record = setup.record
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = [("plugin", f"{record.id}  ({record.dist} {record.version})".replace(" )", ")"))]
    if setup.preset is not None:
        rows.append(("preset", f"{setup.preset.name}: {setup.preset.summary}"))
    else:
        revision = getattr(setup.args, "revision", None)
        rows.append(("checkpoint", f"{setup.checkpoint}{f' at {revision}' if revision else ''}"))
    rows += [("device", outcome.device), ("dtype", outcome.dtype)]
    if tokenizer := outcome.expects.get("tokenizer"):
        rows.append(
            ("tokenizer", _below(str(tokenizer), getattr(setup.args, "checkpoint_dir", None)))
        )
    size = f"{outcome.parameters / 1e6:,.1f} million, " if outcome.parameters else ""
    rows.append(("parameters", f"{size}ready in {outcome.load_s:.2f} s"))
    rows += _inputs(request, outcome.expects.get("cameras") or ())
    if outcome.seed is not None:
        rows.append(("seed", str(outcome.seed)))
    for name, value in rows:
        grid.add_row(name, Text(value))
    console.console().print(grid)


def _below(path: str, folder: Any) -> str:
    """Return ``path``, short when it lies in the checkpoint's folder."""
    if folder is not None and Path(path).is_relative_to(folder):
        return f"{Path(path).relative_to(folder)} of the checkpoint"
    return path


def _inputs(request: Observation, cameras: Sequence[str]) -> list[tuple[str, str]]:
    """Return the header's rows on the observation; cameras left out are named."""
    views = [f"{name} {_size(image)}".rstrip() for name, image in request.images.items()]
    views += [f"{name} left out" for name in cameras if name not in request.images]
    rows = [("cameras", ", ".join(views))] if views else []
    if request.state is not None:
        rows.append(("state", f"{math.prod(numpy.shape(request.state))} values"))
    if request.prompt:
        rows.append(("prompt", request.prompt))
    return rows


def _size(image: Any) -> str:
    """Return width x height of [height, width, 3] or [3, height, width]."""
    shape = numpy.shape(image)
    if len(shape) != 3:
        return ""
    height, width = shape[:2] if shape[2] == 3 else shape[1:]
    return f"{width} x {height}"


def print_result(outcome: Outcome) -> None:
    """Print stage timing, the chunk and peak memory."""
    screen = console.console()
    screen.print()
    screen.print(_timing_table(outcome))
    result = outcome.result
    if isinstance(result, ActionChunk):
        _print_chunk(screen, result)
    else:
        for part in (result, result.sound):
            if part is not None:
                rate = f", {part.rate:g} per second" if part.rate else ""
                screen.print(f"{part.kind} {list(part.data.shape)}{rate}")
    print(f"peak memory of {_process(outcome.ranks)}: {peak_rss_bytes() / 2**20:,.0f} MiB")


def _process(ranks: int) -> str:
    """Return whose memory it is."""
    if ranks == 1:
        return "the process (RSS)"
    return f"this process alone (RSS; the model is on {ranks} ranks)"


def _timing_table(outcome: Outcome) -> Any:
    from rich import box
    from rich.table import Table

    many = len(outcome.timings) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage")
    if many:
        table.add_column("first (ms)", justify="right")
    after = len(outcome.timings) - 1
    table.add_column(f"median of {after} (ms)" if many else "ms", justify="right")
    table.add_column("share", justify="right")
    total = outcome.timing.get("total", 0.0)
    for stage, ms in outcome.timing.items():
        if stage == "total":
            table.add_section()
        first = [f"{outcome.timings[0][stage]:.2f}"] if many else []
        share = f"{ms / total:.0%}" if total else ""
        table.add_row(_indented(stage), *first, f"{ms:.2f}", share)
    if total:
        hz = [""] if many else []
        table.add_row("rate", *hz, f"{1e3 / total:.2f}", "Hz")
    return table


def _indented(stage: str) -> str:
    depth = stage.count("/")
    return "  " * depth + stage.rpartition("/")[2]


def _print_chunk(screen: Console, chunk: ActionChunk) -> None:
    """One line per action dimension; as many steps as fit."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    labels = [max((len(text) for text in texts), default=0) for texts in (chunk.names, chunk.units)]
    room = (screen.width - sum(labels) - 8) // VALUE_WIDTH - 2
    shown = max(1, min(chunk.horizon, MAX_SHOWN, room))
    valid = chunk.actions[chunk.mask] if chunk.mask.any() else chunk.actions
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("action", overflow="fold")
    if chunk.units:
        table.add_column("unit", no_wrap=True)
    for step in range(shown):
        table.add_column(_step_label(step, chunk.control_hz), justify="right", no_wrap=True)
    table.add_column("min", justify="right", style="dim", no_wrap=True)
    table.add_column("max", justify="right", style="dim", no_wrap=True)
    for dim in range(chunk.actions.shape[1]):
        name = chunk.names[dim] if dim < len(chunk.names) else f"action_{dim}"
        unit = [Text(chunk.units[dim])] if dim < len(chunk.units) else [""] if chunk.units else []
        values = [*chunk.actions[:shown, dim], valid[:, dim].min(), valid[:, dim].max()]
        table.add_row(Text(name), *unit, *(f"{value:.4g}" for value in values))
    screen.print(table)
    rate = f" at {chunk.control_hz:g} Hz" if chunk.control_hz else ""
    which = "step 0" if shown == 1 else f"steps 0 to {shown - 1}"
    rest = f"; {which} shown, all with --json" if shown < chunk.horizon else ""
    print(f"{chunk.horizon} steps of {chunk.actions.shape[1]} actions{rate}{rest}")


def _step_label(step: int, control_hz: float | None) -> str:
    return f"{step / control_hz:.2f} s" if control_hz else f"step {step}"


def describe(outcome: Outcome) -> str:
    """Return the title of a picture of this run."""
    setup = outcome.setup
    source = f"preset {setup.preset.name}" if setup.preset else Path(setup.checkpoint or "").name
    parts: Sequence[str] = [setup.record.id, source, outcome.dtype]
    if outcome.seed is not None:
        parts = [*parts, f"seed {outcome.seed}"]
    return ", ".join(parts)
