"""`phyai roofline`: what bounds a robot's control loop, or what a machine reaches. Torch-free
for the first.
"""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import console
from phyai.cli.options import DebugOption, DeviceOption, JsonOption
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.profile.roofline import ControlTime


def roofline(
    inference_ms: Annotated[
        float | None,
        typer.Option("--inference-ms", metavar="MS", help="Latency of one call, t_i."),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            "--bench",
            metavar="FILE.json",
            help="Take t_i from `phyai bench --save`: the median of its first size.",
        ),
    ] = None,
    environment_ms: Annotated[
        float | None,
        typer.Option("--environment-ms", metavar="MS", help="Time per action, t_e: 1000 / Hz."),
    ] = None,
    horizon: Annotated[
        int, typer.Option("--horizon", min=1, help="Actions executed per call, H.")
    ] = 1,
    other_ms: Annotated[
        float, typer.Option("--other-ms", metavar="MS", help="Anything else per call, t_o.")
    ] = 0.0,
    label: Annotated[str, typer.Option("--label", help="Name of the case in the picture.")] = "",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw it (.png, .pdf, .svg).")
    ] = None,
    machine: Annotated[
        bool, typer.Option("--machine", help="Measure this machine's own roofs instead.")
    ] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Tell whether inference or the environment bounds the control rate, and what is to be gained.

    With inference per action known, leave --horizon at 1. Overlapped: the next chunk is computed
    while this one is executed.
    """  # fmt: skip
    if machine:
        if inference_ms is not None or environment_ms is not None or bench is not None:
            raise ConfigError(
                "--machine measures the machine alone; got it with options of a control loop. "
                "Drop one of the two."
            )
        _machine(device, json)
        return
    control = _control(inference_ms, bench, environment_ms, horizon, other_ms)
    if plot is not None:
        from phyai.cli.plots import check_plot
        from phyai.profile.plots import plot_control

        check_plot(plot)
        plot_control([(label or "control-time Roofline", control)], plot)
    if json:
        console.print_json({"label": label, **control.as_dict()})
        return
    from phyai.profile.report import control_lines

    for line in control_lines(control):
        print(line)
    if plot is not None:
        print(f"picture: {plot}")


def _control(
    inference_ms: float | None,
    bench: Path | None,
    environment_ms: float | None,
    horizon: int,
    other_ms: float,
) -> ControlTime:
    from phyai.profile.roofline import ControlTime

    if (inference_ms is None) == (bench is None):
        raise ConfigError(
            "one of --inference-ms MS and --bench FILE.json must be given; got "
            f"{'neither' if bench is None else 'both'}. (--machine measures this machine.)"
        )
    if environment_ms is None:
        raise ConfigError(
            "--environment-ms must be given: the time the robot or simulator takes per action, "
            "1000 / control rate."
        )
    if bench is not None:
        inference_ms = _median_of(bench)
    assert inference_ms is not None
    return ControlTime(inference_ms, environment_ms, horizon, other_ms)


def _median_of(path: Path) -> float:
    """Return the median total time of the first measurement in a file of `phyai bench`."""
    try:
        data: Any = json_module.loads(path.read_text(encoding="utf-8"))
        return float(data["measured"][0]["stages_ms"]["total"]["median"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"--bench must be a file of `phyai bench --save`; got {str(path)!r} "
            f"({type(error).__name__}: {error})."
        ) from error


def _machine(device: str, json: bool) -> None:
    from phyai.cli.run_setup import engine_config

    config = engine_config(device, None, ())
    with console.Waiting("probing the machine"):
        from phyai.engine_config import resolve_device
        from phyai.profile.probe import probe

        machines = probe(resolve_device(config))
    from phyai.profile import report

    if json:
        console.print_json(report.plain({"machine": machines}))
        return
    print(machines[0].name)
    report.show(console.console(), report.machine_table(machines))
