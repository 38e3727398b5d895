"""`phyai profile`: operations, bytes and time of each stage of one request, and what bounds it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import console
from phyai.cli.options import DebugOption, JsonOption, RunOptions, engine_options
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.cli.measuring import Subject
    from phyai.cost import Workload
    from phyai.engine import Engine


@engine_options
def profile(
    wanted: RunOptions,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Rows of the request.")] = 1,
    cameras: Annotated[
        int | None, typer.Option("--cameras", min=1, help="Cameras per row. Default: all.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Prompt tokens. Default: the most.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Solver steps. Default: the checkpoint's.")
    ] = None,
    flops: Annotated[
        bool, typer.Option("--flops", help="Only what the shapes say: no weights, no run.")
    ] = False,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Timed runs.")] = 5,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Untimed runs after the very first one.")
    ] = 1,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Measure the machine: least time and bound of each stage."),
    ] = False,
    counted: Annotated[
        bool, typer.Option("--counted", help="Also count the operations of one run; eager only.")
    ] = False,
    operators: Annotated[
        int, typer.Option("--operators", min=0, metavar="N", help="List the N costliest operators.")
    ] = 0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="Write a Chrome trace of one run."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw operation and latency shares."),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Set the operations and bytes of each stage, from the model's shapes, beside its time.

    "published" counts everything the architecture describes, "computed" what this runtime runs.
    """
    from phyai.cli import measuring, plots
    from phyai.profile import report
    from phyai.profile.plots import plot_shares, share_groups
    from phyai.profile.sweep import grid

    if flops and (counted or trace is not None or operators or plot is not None):
        raise ConfigError(
            "--flops runs nothing; got it with an option that needs a run (--counted, "
            "--operators, --trace, --plot). Drop one of the two."
        )
    if plot is not None:
        plots.check_plot(plot)
    with contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext():
        subject = measuring.subject(wanted, batch)
        cost = measuring.require_cost(subject, "phyai profile")
        given = {"rows": batch, "cameras": cameras, "tokens": tokens, "steps": steps}
        (work,) = grid(cost.workload(), **{k: (v,) for k, v in given.items() if v is not None})
        computed = cost.stages(work, itemsize=subject.itemsize)
        theirs = cost.stages(work, published=True, itemsize=subject.itemsize)
        machines = measuring.probe_machine(subject) if probe else []
        data: dict[str, Any] = {**subject.about, "workload": work.label}
        data |= {"computed": report.costs_json(computed)}
        data |= {"published_account": report.costs_json(theirs), "machine": machines}
        stages, seen = None, _Seen()
        if not flops:
            with measuring.open_engine(subject) as engine:
                (done,) = measuring.run(
                    subject, engine, [work], repeat=repeat, warmup=warmup, seed=0
                )
                seen = _look(subject, engine, work, counted, operators, trace)
            stages = done.stages_ms
            data |= report.measurement_json(done)
        data |= {"counted": seen.counted, "opaque": seen.opaque}
        if plot is not None:
            plot_shares(share_groups([done]), plot, report.title_of(data, work))
    if json:
        console.print_json(report.plain(data))
        return
    print(report.title_of(data, work))
    table = report.cost_table(computed, theirs, machines[0] if machines else None, stages)
    report.show(console.console(), table)
    for line in seen.lines():
        print(line)
    for what, path in (("trace", trace), ("picture", plot)):
        if path is not None:
            print(f"{what}: {path}")


class _Seen:
    """What one more run showed: counted operations by timer, the operator list."""

    def __init__(self) -> None:
        self.counted: dict[str, int] = {}
        self.opaque: list[str] = []
        self.operators = ""

    def lines(self) -> list[str]:
        from phyai.profile.report import tera

        lines = [
            f"counted in {timer or 'no stage'}: {tera(flops)} TFLOP"
            for timer, flops in self.counted.items()
        ]
        if self.opaque:
            lines.append(f"not counted, without a formula: {', '.join(self.opaque)}")
        return lines + ([self.operators] if self.operators else [])


def _look(
    subject: Subject,
    engine: Engine,
    work: Workload,
    counted: bool,
    operators: int,
    trace: Path | None,
) -> _Seen:
    """Run once more under the counter and once under torch's profiler, as asked."""
    from phyai.cli.measuring import request_of

    seen, request = _Seen(), request_of(subject, work, 0)
    if counted:
        from phyai.profile.flops import count_flops

        with console.Waiting("counting operations"):
            timers = engine.core.services.profile.timers
            counter = count_flops(timers, lambda: engine.step(request))
        seen.counted, seen.opaque = dict(counter.flops), sorted(counter.opaque)
    if operators or trace is not None:
        with console.Waiting("profiling operators"):
            seen.operators = _operators(lambda: engine.step(request), operators, trace)
    return seen


def _operators(run: Callable[[], Any], rows: int, trace: Path | None) -> str:
    """Return torch's table of the costliest operators and write the trace."""
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        run()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(trace))
    if not rows:
        return ""
    on_gpu = len(activities) > 1
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    table: str = found.key_averages().table(sort_by=order, row_limit=rows)
    return table
