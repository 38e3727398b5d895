"""`phyai run`: one plugin, one observation, its actions, and what each stage cost."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import console
from phyai.cli.options import MANY, DebugOption, JsonOption, RunOptions, engine_options
from phyai.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from phyai.cli.run_report import Outcome
    from phyai.cli.run_setup import Setup
    from phyai.engine import Engine
    from phyai.graph import RegionReport
    from phyai.manifest import AdapterManifest
    from phyai.types import Observation


@engine_options
def run(
    wanted: RunOptions,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", metavar="CAMERA=FILE", help=f"An image of a camera. {MANY}"),
    ] = None,
    state: Annotated[
        str | None, typer.Option("--state", metavar="0.1,-0.2,...", help="The robot's state.")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The task, as text.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option", metavar="NAME=VALUE", help=f"An option of the observation. {MANY}"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the noise. Default: 0.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Solver steps. Default: the checkpoint's.")
    ] = None,
    repeat: Annotated[
        int, typer.Option("--repeat", min=1, help="Run this often; shows first and median times.")
    ] = 1,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", metavar="ID", help="Send the repetitions as frames of a session."
        ),
    ] = None,
    json: JsonOption = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw the chunk (.png, .pdf, .svg)."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", metavar="DIR", help="Write observation, result, config, timing."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the video, image or sound it makes."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --record write into a folder with other files.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Run a plugin on one observation and print what it makes and the time of each stage.

    Without --checkpoint a preset of the plugin is built, with its own example observation.
    """  # fmt: skip
    from phyai.cli import media, observation, plots, run_report, run_setup
    from phyai.cli import record as records

    files = observation.split_images(image or [])
    numbers = observation.parse_state(state)
    if plot is not None:
        plots.check_plot(plot)
    if record is not None:
        records.check_folder(record, force=force)
    elif force:
        raise ConfigError("--force belongs to --record DIR; got it alone.")
    hidden = contextlib.redirect_stdout(sys.stderr) if json else contextlib.nullcontext()
    with hidden:
        setup = run_setup.prepare(wanted)
        for name, place in (("--plot", plot), ("--record", record)):
            if place is not None:
                _check_actions(setup.manifest, name)
        given = media.parse_options(option or [])
        setup, options = _request_options(setup, seed, steps)
        request = observation.merge(
            setup.sample,
            images=media.read_views(files, setup.manifest),
            state=numbers,
            prompt=prompt,
            options={**options, **given},
        )
        writer = None if out is None else media.check_out(out, setup.manifest, request, setup.args)
        outcome = _execute(setup, request, repeat, session, show_header=not json)
        if not json:  # before what may still go wrong
            run_report.print_result(outcome)
        if writer is not None and out is not None:
            with console.Waiting("writing the file"):
                writer.write(out, outcome.result)
        if plot is not None:
            plots.plot_chunk(_chunk(outcome, "--plot"), plot, run_report.describe(outcome))
        data = run_report.as_json(outcome) if json or record is not None else {}
        if record is not None:
            large = ("actions", "model_actions", "mask", "names", "units", "timings")
            records.write_record(
                record,
                observation=request,
                chunk=_chunk(outcome, "--record"),
                plugin=setup.record.id,
                args=setup.args,
                config=setup.config,
                facts={key: value for key, value in data.items() if key not in large},
            )
    if json:
        console.print_json(data)
        return
    for what, path in (("picture", plot), ("record", record), ("media", out)):
        if path is not None:
            print(f"{what}: {path}")


def _request_options(
    setup: Setup, seed: int | None, steps: int | None
) -> tuple[Setup, dict[str, Any]]:
    """Return the observation options; --steps goes into the arguments where only they know it."""
    known = setup.manifest.capabilities.get("options")
    options: dict[str, Any] = {}
    if known is None or "seed" in known:
        options["seed"] = 0 if seed is None else seed
    elif seed is not None:
        raise ConfigError(f"plugin {setup.record.id!r} takes no --seed; got {seed}. Drop it.")
    if steps is None:
        return setup, options
    if known is None or "num_steps" in known:
        return setup, {**options, "num_steps": steps}
    if not hasattr(setup.args, "num_steps"):
        raise ConfigError(f"plugin {setup.record.id!r} takes no --steps; got {steps}. Drop it.")
    return replace(setup, args=replace(setup.args, num_steps=steps)), options


def _execute(
    setup: Setup, request: Observation, repeat: int, session: str | None, *, show_header: bool
) -> Outcome:
    """Load the engine and run the request, the header going out before the first run.

    session: each repetition is the next frame of it.
    """
    with console.Waiting("importing torch"):
        from phyai.engine import Engine, EngineArgs
    from phyai.cli import run_report
    from phyai.cli.observation import needs

    began = time.perf_counter()
    with console.Waiting("loading weights") as progress:
        engine = Engine(EngineArgs(setup.plugin, setup.args, setup.config), progress=progress)
    with engine:
        about = engine.describe()  # ranks have their adapters in other processes
        outcome = run_report.Outcome(
            setup=setup,
            result=None,
            timings=(),
            seed=request.seed,
            load_s=time.perf_counter() - began,
            parameters=run_report.count_parameters(engine),
            device=str(about["device"]),
            dtype=setup.precision or _dtype(engine),
            expects=about["expects"],
            ranks=engine.config.parallel.infer_replica_world_size(),
        )
        if show_header:
            run_report.print_header(outcome, request)
        timings: list[Mapping[str, float]] = []
        result: Any = None
        try:
            with console.Waiting("running") as progress:
                for done in range(repeat):
                    progress(done, repeat if repeat > 1 else 0)
                    frame = _frame(request, session, done)
                    result = engine.step(frame) if repeat > 1 else stepwise(engine, frame, progress)
                    timings.append(result.timing)
        except RequestError as error:
            hint = needs(about["expects"], setup.manifest, request)
            raise RequestError(f"{error} {hint}".rstrip()) from error
        if engine.core is not None:
            for line in compiled_lines(engine.core.services.graphs.report()):
                print(line, file=sys.stderr)
    return replace(outcome, result=result, timings=tuple(timings))


def stepwise(engine: Engine, request: Any, progress: console.Waiting) -> Any:
    """Return the result of a request, showing its solver steps where they run one by one."""
    if engine.adapter is not None and engine.adapter.graph_unit != "step":
        return engine.step(request)

    def show(done: int, total: int) -> None:
        progress(done, total, f"running: step {done} of {total}")

    future = engine.submit(request, show)
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C: it ends after the step that runs
        raise


def _frame(request: Observation, session: str | None, seq: int) -> Observation:
    if session is None:
        return request
    return replace(request, options={**request.options, "session_id": session, "seq": seq})


def compiled_lines(regions: Sequence[RegionReport]) -> list[str]:
    """Return what was compiled or captured and in what time, and what fell back to eager."""
    lines = []
    for mode, verb in (("inductor", "compiled"), ("cuda", "captured")):
        done = [region for region in regions if region.mode == mode and region.captures]
        if done:
            seconds, size = sum(r.compile_s for r in done), sum(r.nbytes for r in done)
            more = f", {size / 2**20:,.0f} MiB" if size else ""
            if cached := sum(region.cached for region in done):
                more += f", {cached} of them from the compiler's cache"
            lines.append(f"graphs: {len(done)} regions {verb} in {seconds:.1f} s{more}")
    eager = [region for region in regions if region.mode == "eager" and region.reason]
    return lines + [f"graphs: {r.name} runs eagerly: {r.reason}" for r in eager]


def _dtype(engine: Any) -> str:
    """Return the adapter's name of its precision, or the engine's dtype."""
    name = getattr(getattr(engine.adapter, "precision", None), "name", None)
    return name if isinstance(name, str) else engine.config.device.dtype_name


def _check_actions(manifest: AdapterManifest, option: str) -> None:
    """Raise ConfigError, before anything is loaded, for a plugin that makes media alone."""
    if manifest.media and "action_dim" not in manifest.capabilities:
        raise _no_actions(option, manifest.id, "media")


def _chunk(outcome: Outcome, option: str) -> Any:
    from phyai.types import ActionChunk

    if not isinstance(outcome.result, ActionChunk):
        raise _no_actions(option, outcome.setup.record.id, type(outcome.result).__name__)
    return outcome.result


def _no_actions(option: str, plugin: str, returned: str) -> ConfigError:
    return ConfigError(
        f"{option} needs a plugin that returns actions; {plugin!r} returns {returned}. "
        "Drop the option."
    )
