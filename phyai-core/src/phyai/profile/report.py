"""Measurements as tables and as JSON; figures of others always say that they are published."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phyai.cost import Published, StageCost, Workload, flop_shares, total_flops
from phyai.profile.roofline import ControlTime, Machine

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from phyai.profile.sweep import Conditions, Measurement, Spread

FORMAT = "phyai-bench/1"
PUBLISHED_TITLE = "published by others, not measured here (ms)"


# ---------------------------------------------------------------- JSON


def bench_json(
    about: Mapping[str, Any],
    conditions: Conditions,
    measured: Sequence[Measurement],
    machines: Sequence[Machine] = (),
    published: Published | None = None,
) -> dict[str, Any]:
    """Return everything of a series of measurements."""
    data: dict[str, Any] = {
        "format": FORMAT,
        **about,
        "conditions": dataclasses.asdict(conditions),
        "measured": [
            {"workload": dataclasses.asdict(one.workload), **measurement_json(one)}
            for one in measured
        ],
        "machine": plain(machines),
    }
    if published is not None:
        data["published"] = plain(published)
    return data


def plain(value: Any) -> Any:
    """Return a value with its dataclasses as mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def costs_json(stages: Sequence[StageCost]) -> list[dict[str, Any]]:
    """Return the stages of one account, their shares and their sum."""
    shares = flop_shares(stages)
    return [{**dataclasses.asdict(stage), "flop_share": shares[stage.stage]} for stage in stages]


def measurement_json(one: Measurement) -> dict[str, Any]:
    """Return times, rate and costs of one workload."""
    data: dict[str, Any] = {
        "first_ms": one.first_ms,
        "rows_per_s": one.rows_per_s,
        "stages_ms": {name: dataclasses.asdict(s) for name, s in one.stages_ms.items()},
    }
    if one.computed:
        data["computed"] = costs_json(one.computed)
        data["published_account"] = costs_json(one.published)
        data["latency_shares"] = one.latency_shares()
    return data


# ---------------------------------------------------------------- tables


def bench_table(measured: Sequence[Measurement]) -> Table:
    """Return one line per workload: median and spread of the total, medians of the stages."""
    table = _table("")
    stages = _stage_names(measured)
    shown = [name.rpartition("/")[2] for name in stages]
    sizes = ("rows", "cameras", "tokens", "steps")
    for name in (*sizes, "total ms", "min..max", "first", *shown, "rows/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in measured:
        work, total = one.workload, one.total_ms
        cells = [
            _ms(one.stages_ms[name].median) if name in one.stages_ms else "" for name in stages
        ]
        table.add_row(
            *(str(n) for n in (work.rows, work.cameras, work.tokens, work.steps)),
            _ms(total.median),
            f"{_ms(total.low)}..{_ms(total.high)}",
            _ms(one.first_ms),
            *cells,
            f"{one.rows_per_s:.3g}",
        )
    return table


def _stage_names(measured: Sequence[Measurement]) -> list[str]:
    """Return the timers worth a column: those inside a stage instead of the stage itself."""
    names: dict[str, None] = {}
    for one in measured:
        names.update(dict.fromkeys(one.stages_ms))
    parents = {name.rpartition("/")[0] for name in names}
    left_out = {"total", "prepare", "load", "output", "validate"} | parents
    return [name for name in names if name not in left_out]


def cost_table(
    computed: Sequence[StageCost],
    published: Sequence[StageCost],
    machine: Machine | None = None,
    latencies: Mapping[str, Spread] | None = None,
) -> Table:
    """Return one line per stage: operations by both accounts, bytes, and what was measured.

    latencies: timer path -> milliseconds of one workload.
    """
    table = _table("")
    table.add_column("stage")
    counts = ("published\nTFLOP", "\nshare", "computed\nTFLOP", "\nshare", "\nGB", "FLOP\n/byte")
    measured = ("measured\nms", "\nshare", "\nTFLOP/s", "\nGB/s") if latencies is not None else ()
    for name in (*counts, *measured):
        table.add_column(name, justify="right", no_wrap=True)
    if machine is not None:
        table.add_column("least\nms", justify="right", no_wrap=True)
        table.add_column("bound", no_wrap=True)
    theirs = {stage.stage: stage for stage in published}
    shares = flop_shares(computed), flop_shares(published)
    for stage in computed:
        other = theirs.get(stage.stage)
        row = [stage.stage, tera(other.flops) if other else ""]
        row += [_percent(shares[1][stage.stage]) if other else "", tera(stage.flops)]
        row += [_percent(shares[0][stage.stage]), _giga(stage.bytes), f"{stage.intensity:,.0f}"]
        row += _measured_cells(stage, latencies)
        if machine is not None:
            row += [
                _ms(machine.least_ms([stage])),
                machine.bound_of(stage.flops, stage.bytes),
            ]
        table.add_row(*row)
    table.add_section()
    row = ["total", tera(total_flops(published)), "", tera(total_flops(computed)), ""]
    row += [_giga(sum(stage.bytes for stage in computed)), ""]
    if latencies is not None:
        total = latencies["total"].median
        row += [_ms(total), "", f"{total_flops(computed) / total / 1e9:.3g}", ""]
    if machine is not None:
        row += [_ms(machine.least_ms(computed)), ""]
    table.add_row(*row)
    return table


def _measured_cells(stage: StageCost, latencies: Mapping[str, Spread] | None) -> list[str]:
    if latencies is None:
        return []
    spread = latencies.get(stage.timer)
    if spread is None:
        return ["", "", "", ""]
    ms, total = spread.median, latencies["total"].median
    return [
        _ms(ms),
        _percent(ms / total),
        f"{stage.flops / ms / 1e9:.3g}",
        f"{stage.bytes / ms / 1e6:.3g}",
    ]


def machine_table(machines: Sequence[Machine]) -> Table:
    """Return one line per dtype: operations, bytes, and where the two roofs meet."""
    table = _table("")
    table.add_column("dtype")
    for name in ("TFLOP/s", "GB/s", "ridge FLOP/byte"):
        table.add_column(name, justify="right", no_wrap=True)
    for machine in machines:
        table.add_row(
            machine.dtype,
            f"{machine.flops_per_s / 1e12:.3g}",
            f"{machine.bytes_per_s / 1e9:.3g}",
            f"{machine.ridge:.3g}",
        )
    return table


def published_table(published: Published) -> Table:
    """Return the figures of others, each with its source."""
    table = _table(PUBLISHED_TITLE)
    for name in ("source", "model", "hardware", "conditions", "precision"):
        table.add_column(name, overflow="fold")
    table.add_column("published ms", justify="right", no_wrap=True)
    for row in published.figures:
        table.add_row(row.source, row.model, row.hardware, row.conditions, row.precision, row.ms)
    return table


def control_lines(control: ControlTime) -> list[str]:
    """Return what the control-time Roofline says, in words."""
    c = control
    per_action = c.call_ms / c.horizon
    hides = "hides" if c.call_ms <= c.ridge_ms else "does not hide"
    return [
        f"inference   {_ms(c.inference_ms)} ms per call"
        + (f" + {_ms(c.other_ms)} ms other" if c.other_ms else "")
        + f", {c.horizon} action{'s' if c.horizon > 1 else ''} each:"
        f" {per_action:.4g} ms per action, supply {c.supply_hz:.2f} Hz",
        f"environment {c.environment_ms:.4g} ms per action, {c.environment_hz:.2f} Hz",
        f"rate        {c.synchronous_hz:.2f} Hz one after the other,"
        f" {c.overlapped_hz:.2f} Hz overlapped",
        f"ridge       {_ms(c.ridge_ms)} ms per call, or {c.ridge_horizon:.3g} actions per call:"
        f" inference {hides} behind the environment",
        f"verdict     {c.verdict}; faster inference can bring at most"
        f" {_gain(c.largest_gain)} ({_gain(c.largest_overlapped_gain)} overlapped)",
    ]


def _gain(gain: float) -> str:
    return f"{gain:.0%}" if gain < 2 else f"{1 + gain:.1f}x"


def show(screen: Console, table: Table, widest: int = 1000) -> None:
    """Print a table in full: wider than the screen, up to ``widest``, rather than cut off."""
    from rich.console import Console
    from rich.measure import Measurement as Width

    wanted = Width.get(screen, screen.options.update(max_width=widest), table).maximum
    if wanted > screen.width:
        screen = Console(file=screen.file, width=wanted, highlight=False)
    screen.print(table)


def title_of(about: Mapping[str, Any], work: Workload | None = None) -> str:
    """Return the title of a picture: what ran, on what, at which size."""
    parts = [str(about[name]) for name in ("plugin", "preset", "dtype") if about.get(name)]
    return ", ".join(parts + ([work.label] if work else []))


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title or None, title_justify="left")


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


def tera(flops: float) -> str:
    """Return operations in units of 1e12, few digits when they are few."""
    return f"{flops / 1e12:.4f}" if flops >= 1e10 else f"{flops / 1e12:.3g}"


def _giga(count: float) -> str:
    return f"{count / 1e9:.3f}" if count >= 1e7 else f"{count / 1e9:.2g}"
