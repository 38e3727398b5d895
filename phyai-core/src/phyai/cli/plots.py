"""A chunk as a picture: one panel per action dimension. Imports matplotlib when called."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import console
from phyai.errors import ConfigError, MissingDependency, did_you_mean

if TYPE_CHECKING:
    from phyai.types import ActionChunk

SUFFIXES = (".png", ".pdf", ".svg")
PANEL_IN = (3.2, 1.55)
LINE, MASKED = "#1f5fa8", "#dcdcdc"


def check_plot(path: Path) -> None:
    """Raise before anything is computed: MissingDependency, ConfigError for another file type."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"--plot must end with {', '.join(SUFFIXES)}; got {str(path)!r}."
            + did_you_mean(path.suffix, SUFFIXES)
        )
    console.check_writable("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "--plot needs matplotlib; got an environment without it. "
            "Install it with `pip install 'phyai-core[plots]'`."
        ) from error


def plot_chunk(chunk: ActionChunk, path: Path, title: str) -> None:
    """Write the picture of a chunk; the time axis is in seconds when its rate is known."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    horizon, dims = chunk.actions.shape
    columns = min(dims, 1 if dims <= 2 else 2 if dims <= 8 else 4)
    rows = math.ceil(dims / columns)
    width, height = max(columns * PANEL_IN[0], 5.0), rows * PANEL_IN[1] + 0.9
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False)
    step_s = 1.0 / chunk.control_hz if chunk.control_hz else 1.0
    times = [index * step_s for index in range(horizon)]
    label = "time (s)" if chunk.control_hz else "step"
    for dim, panel in enumerate(panels.flat):
        if dim >= dims:
            panel.set_visible(False)
            continue
        _panel(panel, chunk, dim, times)
        if dim + columns >= dims:  # the lowest panel of its column
            panel.set_xlabel(label, fontsize=8)
            panel.tick_params(labelbottom=True)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panel(panel: Any, chunk: ActionChunk, dim: int, times: list[float]) -> None:
    values = chunk.actions[:, dim]
    panel.plot(times, values, color=LINE, linewidth=1.2, marker=".", markersize=3)
    half = 0.5 * (times[1] if len(times) > 1 else 1.0)
    for time, valid in zip(times, chunk.mask, strict=True):
        if not valid:
            panel.axvspan(time - half, time + half, color=MASKED, linewidth=0)
    name = chunk.names[dim] if dim < len(chunk.names) else f"action_{dim}"
    unit = chunk.units[dim] if dim < len(chunk.units) else ""
    panel.set_title(name, fontsize=8, loc="left", pad=3)
    if unit:
        panel.set_ylabel(unit, fontsize=8)
    panel.grid(True, color="#e6e6e6", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.tick_params(labelsize=7, length=2)
    panel.margins(x=0.02, y=0.12)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
