"""Pictures of measurements: shares, throughput, kernel roofline, control-time Roofline.

Each function imports matplotlib when called and writes one file (.png, .pdf, .svg).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cost import StageCost, flop_shares
from phyai.errors import MissingDependency
from phyai.profile.roofline import ControlTime, Machine

if TYPE_CHECKING:
    from phyai.profile.sweep import Measurement

COLOURS = ("#1f5fa8", "#e08a1e", "#3a9a5b", "#8a5fb0", "#b3433f", "#5c6b73")
OTHER, GREY, ROOF = "#c9c9c9", "#8a8a8a", "#333333"
LABEL_FROM = 0.045
"""Bars narrower than this part get their number in the legend only."""


def check_matplotlib() -> None:
    """Raise MissingDependency before anything is computed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "plots need matplotlib; got an environment without it. "
            "Install it with `pip install 'phyai-core[plots]'`."
        ) from error


# ---------------------------------------------------------------- shares


def plot_shares(
    groups: Sequence[tuple[str, Sequence[tuple[str, dict[str, float]]]]], path: Path, title: str
) -> None:
    """Draw groups of bars, each bar (label, stage -> share), stages in equal colours.

    Operations and latency side by side show which stage is slower than its work.
    """
    bars = [bar for _, group in groups for bar in group]
    stages = [n for n in dict.fromkeys(n for _, shares in bars for n in shares) if n != "other"]
    colours = dict(zip(stages, COLOURS * 4, strict=False)) | {"other": OTHER}
    step = 1.0 if len(groups) == 1 else 1.75
    figure = _figure(7.4, 1.2 + 0.42 * (len(bars) + (step - 1.0) * len(groups)))
    axes = figure.subplots()
    at, ticks = 0.0, []
    for name, group in groups:
        if len(groups) > 1:
            axes.text(0, at - 0.5, name, fontsize=8, va="bottom", fontweight="bold")
        for _, shares in group:
            _share_bar(axes, at, shares, colours)
            ticks.append(at)
            at += 1.0
        at += step - 1.0
    axes.set_yticks(ticks, [label for label, _ in bars], fontsize=8)
    axes.set_ylim(max(ticks) + 0.55, -0.55 if len(groups) == 1 else -1.05)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"], fontsize=8)
    _open_frame(axes, left=False)
    axes.tick_params(axis="y", length=0)
    if any("other" in shares for _, shares in bars):
        stages.append("other")
    handles = [_patch(colours[name], name) for name in stages]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(stages), frameon=False, fontsize=8
    )
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def _share_bar(axes: Any, at: float, shares: dict[str, float], colours: dict[str, str]) -> None:
    left = 0.0
    for name, share in shares.items():
        axes.barh(at, share, left=left, color=colours[name], height=0.8)
        if share >= LABEL_FROM:
            axes.text(
                left + share / 2, at, f"{100 * share:.1f} %", ha="center", va="center_baseline",
                fontsize=8, color="#333333" if name == "other" else "white",
            )  # fmt: skip
        left += share


def share_groups(
    measured: Sequence[Measurement],
) -> list[tuple[str, list[tuple[str, dict[str, float]]]]]:
    """Return operations and latency of each workload, for ``plot_shares``."""
    return [
        (
            one.workload.label,
            [("operations", flop_shares(one.timed)), ("latency", one.latency_shares())],
        )
        for one in measured
    ]


# ---------------------------------------------------------------- throughput


def plot_throughput(groups: Sequence[Sequence[Measurement]], path: Path, title: str) -> None:
    """Draw rows per second against rows per request, one line per group, min..max as bars.

    The number at a line's end is the gain over its first point.
    """
    figure = _figure(6.4, 4.0)
    axes = figure.subplots()
    top = 0.0
    for colour, group in zip(COLOURS * 4, groups, strict=False):
        rows = [one.workload.rows for one in group]
        rates = [one.rows_per_s for one in group]
        low = [r - 1e3 * n / one.total_ms.high for r, n, one in _zip(rates, rows, group)]
        high = [1e3 * n / one.total_ms.low - r for r, n, one in _zip(rates, rows, group)]
        label = group[0].workload.label.partition(", ")[2]
        axes.errorbar(
            rows, rates, yerr=(low, high), color=colour, marker="o", markersize=4.5,
            linewidth=1.5, capsize=3, elinewidth=0.9, label=label,
        )  # fmt: skip
        axes.annotate(
            f"{rates[-1] / rates[0]:.2f}x", (rows[-1], rates[-1]), textcoords="offset points",
            xytext=(8, 0), va="center", fontsize=8, color=colour,
        )  # fmt: skip
        top = max(top, *(r + h for r, h in zip(rates, high, strict=True)))
    ticks = sorted({one.workload.rows for group in groups for one in group})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.set_xlabel("rows per request (batch)", fontsize=9)
    axes.set_ylabel("rows per second", fontsize=9)
    _open_frame(axes)
    axes.set_xlim(min(ticks) / 1.2, max(ticks) * 1.35)
    axes.set_ylim(0, 1.28 * top)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


# ---------------------------------------------------------------- kernel roofline


def plot_roofline(
    machines: Sequence[Machine],
    points: Sequence[tuple[str, StageCost, float]],
    path: Path,
    title: str,
) -> None:
    """Draw the roofs of a machine and where stages stand under the first of them.

    points: (label, stage, milliseconds).
    """
    figure = _figure(7.0, 4.6)
    axes = figure.subplots()
    intensities = [stage.intensity for _, stage, _ in points if math.isfinite(stage.intensity)]
    edges = [*intensities, *(machine.ridge for machine in machines)]
    left, right = min(edges) / 6, max(edges) * 6
    for machine, style in zip(machines, ("-", "--", ":"), strict=False):
        corners = [left, machine.ridge, right]
        axes.plot(
            corners, [machine.attainable(x) / 1e9 for x in corners], style, color=ROOF,
            linewidth=1.5,
            label=f"{machine.dtype}: {_rate(machine.flops_per_s)}, "
            f"{machine.bytes_per_s / 1e9:.3g} GB/s",
        )  # fmt: skip
    heights = [machine.attainable(left) / 1e9 for machine in machines]
    marks = zip(COLOURS * 4, "osD^vP" * 4, points, strict=False)
    for colour, mark, (label, stage, ms) in marks:
        reached, best = stage.flops / ms / 1e6, machines[0].attainable(stage.intensity) / 1e9
        heights.append(reached)
        axes.plot([stage.intensity] * 2, [reached, best], ":", color=colour, linewidth=1)
        axes.plot(
            stage.intensity, reached, mark, color=colour, markersize=7, linestyle="none",
            label=f"{label}: {_rate(1e9 * reached)}, {reached / best:.0%} of the roof",
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    top = max(machine.flops_per_s for machine in machines) / 1e9
    axes.set_ylim(min(heights) / 2, top * 2)
    _plain_ticks(axes)
    axes.set_xlabel("operations per byte that must move (FLOP/byte)", fontsize=9)
    axes.set_ylabel("GFLOP/s", fontsize=9)
    _open_frame(axes)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


# ---------------------------------------------------------------- control-time Roofline


def plot_control(cases: Sequence[tuple[str, ControlTime]], path: Path, title: str = "") -> None:
    """Draw one panel per case: control rate against time per action, roofs, ridge, the case."""
    figure = _figure(5.4 * len(cases), 4.3)
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, (label, control) in zip(panels, cases, strict=True):
        _control_panel(axes, label, control)
    if title:
        figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _control_panel(axes: Any, label: str, c: ControlTime) -> None:
    ridge, here = c.environment_ms, c.call_ms / c.horizon
    left, right = min(ridge, here) / 8, max(ridge, here) * 8
    xs = [left * (right / left) ** (i / 200) for i in range(201)]
    roof = c.environment_hz
    axes.plot(xs, [min(1e3 / x, roof) for x in xs], color=ROOF, linewidth=1.6,
              label="overlapped: min(supply, environment)")  # fmt: skip
    axes.plot(xs, [1e3 / (x + ridge) for x in xs], color=COLOURS[0], linewidth=1.6,
              label="one after the other")  # fmt: skip
    axes.axvspan(left, ridge, color="#eef3ea", zorder=0)
    axes.axvspan(ridge, right, color="#f8eee9", zorder=0)
    bottom, top = 1e3 / (right + ridge) / 1.6, roof * 2.4
    axes.axvline(ridge, color=GREY, linestyle=":", linewidth=1)
    for x, word, side in ((ridge / 1.12, "environment-bound", "right"),
                          (ridge * 1.12, "inference-bound", "left")):  # fmt: skip
        axes.text(x, bottom * 1.12, word, ha=side, va="bottom", fontsize=8, color="#555555")
    axes.plot(here, c.overlapped_hz, "o", color=ROOF, markersize=6, zorder=5)
    axes.plot(here, c.synchronous_hz, "o", color=COLOURS[0], markersize=7, zorder=5)
    offset = (8, 2) if c.verdict == "inference-bound" else (0, 8)
    axes.annotate(
        f"{c.overlapped_hz:.2f} Hz", (here, c.overlapped_hz), fontsize=9, ha="left", va="bottom",
        textcoords="offset points", xytext=offset, color=ROOF,
    )  # fmt: skip
    axes.annotate(
        f"{c.synchronous_hz:.2f} Hz", (here, c.synchronous_hz), fontsize=9, ha="right", va="top",
        textcoords="offset points", xytext=(-5, -7), color=COLOURS[0], fontweight="bold",
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    _plain_ticks(axes)
    axes.set_xlabel("inference and other time per action, $(t_i + t_o)/H$ (ms)", fontsize=9)
    axes.set_ylabel("control rate (Hz)", fontsize=9)
    gain = c.largest_gain
    most = f"{gain:.0%}" if gain < 2 else f"{1 + gain:.1f}x"
    axes.set_title(f"{label}\n{c.verdict}, faster inference brings at most {most}", fontsize=9)
    _open_frame(axes)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=8, loc="upper right")


# ---------------------------------------------------------------- shared


def _figure(width: float, height: float) -> Any:
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)


def _open_frame(axes: Any, *, left: bool = True) -> None:
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=2)
    for side in ("top", "right") if left else ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _plain_ticks(axes: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _rate(flops_per_s: float) -> str:
    return f"{flops_per_s / 1e12:.3g} TFLOP/s" if flops_per_s >= 1e12 else (
        f"{flops_per_s / 1e9:.3g} GFLOP/s"
    )  # fmt: skip


def _zip(*columns: Sequence[Any]) -> Any:
    return zip(*columns, strict=True)
