"""`phyai bench`: stage times of requests of many sizes, as table, JSON and pictures."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import console
from phyai.cli.options import DebugOption, JsonOption, RunOptions, engine_options

if TYPE_CHECKING:
    from phyai.profile.roofline import Machine
    from phyai.profile.sweep import Measurement

SIZES = "1,2,4"


@engine_options
def bench(
    wanted: RunOptions,
    batch: Annotated[
        str | None, typer.Option("--batch", metavar=SIZES, help="Rows per request. Default: 1.")
    ] = None,
    cameras: Annotated[
        str | None,
        typer.Option("--cameras", metavar=SIZES, help="Cameras per row. Default: all of them."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", metavar=SIZES, help="Prompt tokens. Default: the longest prompt."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar=SIZES, help="Solver steps. Default: the checkpoint's."),
    ] = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs of each size.")] = 10,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Untimed runs after the very first one.")
    ] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the inputs.")] = 0,
    probe: Annotated[
        bool, typer.Option("--probe", help="Also measure what the machine reaches at best.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Also list latencies published by others.")
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            "--plots",
            metavar="DIR",
            help="Draw shares.png, throughput.png (several batches) and roofline.png (--probe).",
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE.json", help="Write everything as JSON.")
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time every combination of the sizes given and print medians with their spread.

    Sizes are lists such as 1,2,4. Times of the first run, which builds and allocates, are shown
    apart.
    """
    from phyai.cli import measuring
    from phyai.profile import plots as pictures
    from phyai.profile import report
    from phyai.profile.sweep import Watch, grid, parse_sizes

    sizes = {
        name: parse_sizes(f"--{option}", text)
        for name, option, text in (("rows", "batch", batch), ("cameras", "cameras", cameras),
                                   ("tokens", "tokens", tokens), ("steps", "steps", steps))
    }  # fmt: skip
    if save is not None:
        console.check_writable("--save", save)
    if plots is not None:
        pictures.check_matplotlib()
        console.check_writable("--plots", plots, folder=True)
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        subject = measuring.subject(wanted, max(sizes["rows"] or (1,)))
        figures = measuring.require_cost(subject, "--published").published() if published else None
        if subject.cost is not None:  # sizes out of range are refused before the weights load
            for workload in grid(subject.cost.workload(), **sizes):
                subject.cost.stages(workload)
        machines = measuring.probe_machine(subject) if probe else []
        with measuring.open_engine(subject) as engine:
            watch = Watch()
            workloads = grid(measuring.base_workload(subject, engine), **sizes)
            measured = measuring.run(
                subject, engine, workloads, repeat=repeat, warmup=warmup, seed=seed
            )
            conditions = watch.conditions(engine.core.device)
            about = {**subject.about, "device": str(engine.core.device)}
    about |= {"repeat": repeat, "warmup": warmup, "seed": seed}
    drawn = _draw(measured, machines, plots, report.title_of(about)) if plots is not None else []
    data = report.bench_json(about, conditions, measured, machines, figures)
    if save is not None:
        measuring.save_json(save, data)
    if json:
        console.print_json(data)
        return
    screen = console.console()
    for line in (report.title_of(about), *conditions.lines()):
        print(line)
    print(f"median of {repeat} after {warmup + 1} runs; ms unless said otherwise")
    report.show(screen, report.bench_table(measured))
    if machines:
        report.show(screen, report.machine_table(machines))
    if figures is not None:
        report.show(screen, report.published_table(figures), widest=140)
        print(figures.note)
    for path in drawn:
        print(f"picture: {path}")


def _draw(
    measured: list[Measurement], machines: list[Machine], folder: Path, title: str
) -> list[Path]:
    """Draw what the measurements allow and return the files."""
    from phyai.profile import plots
    from phyai.profile.sweep import batches

    drawn: list[Path] = []
    timed = [one for one in measured if one.timed]
    if timed:
        plots.plot_shares(plots.share_groups(timed[:6]), folder / "shares.png", title)
        drawn.append(folder / "shares.png")
    groups = list(batches(measured))
    if groups:
        plots.plot_throughput(groups, folder / "throughput.png", title)
        drawn.append(folder / "throughput.png")
    if machines and timed:
        points: list[Any] = [
            (s.stage, s, timed[0].stages_ms[s.timer].median) for s in timed[0].timed
        ]
        name = f"{title}, {timed[0].workload.label}"
        plots.plot_roofline(machines, points, folder / "roofline.png", name)
        drawn.append(folder / "roofline.png")
    return drawn
