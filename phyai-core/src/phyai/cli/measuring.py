"""What `phyai bench` and `phyai profile` share: an engine for many sizes, and requests for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import console, run_setup
from phyai.cost import CostModel, Workload
from phyai.errors import ConfigError, PluginContractError

if TYPE_CHECKING:
    from phyai.cli.run_setup import RunOptions, Setup
    from phyai.engine import Engine
    from phyai.profile.sweep import Measurement

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Subject:
    """What is measured: a setup and, when its plugin has one, the cost model of its checkpoint."""

    setup: Setup
    cost: CostModel | None

    @property
    def itemsize(self) -> int:
        return ITEMSIZE.get(self.setup.config.device.dtype_name, 2)

    @property
    def about(self) -> dict[str, Any]:
        """What identifies a run, JSON-ready."""
        setup = self.setup
        return {
            "plugin": setup.record.id,
            "preset": setup.preset.name if setup.preset else None,
            "checkpoint": setup.checkpoint,
            "dtype": setup.precision or setup.config.device.dtype_name,
            "device": str(setup.config.device.target),
            "graph_backend": setup.config.runtime.graph_backend,
        }


def subject(options: RunOptions, rows: int = 1) -> Subject:
    """Return the setup of these options with room for ``rows``, and its cost model."""
    setup = run_setup.prepare(options)
    if rows > getattr(setup.args, "max_batch_size", rows):
        setup = replace(setup, args=replace(setup.args, max_batch_size=rows))
    return Subject(setup, _cost_model(setup))


def _cost_model(setup: Setup) -> CostModel | None:
    if not setup.manifest.cost:
        return None
    model = run_setup.load_function(setup.manifest.cost, setup.record)(setup.args)
    if not isinstance(model, CostModel):
        raise PluginContractError(
            f"cost function {setup.manifest.cost!r} of plugin {setup.record.id!r} must return a "
            f"phyai.cost.CostModel; got {type(model).__name__}."
        )
    return model


def require_cost(subject: Subject, option: str) -> CostModel:
    """Return the cost model; ConfigError when the plugin has none."""
    if subject.cost is None:
        raise ConfigError(
            f"{option} needs a plugin that says what its requests cost; "
            f"{subject.setup.record.id!r} does not. Drop the option."
        )
    return subject.cost


def open_engine(subject: Subject) -> Engine:
    """Return the running engine, loading it with progress.

    Raises: ConfigError for several ranks: what is measured of them is in other processes.
    """
    setup = subject.setup
    ranks = setup.config.parallel.infer_replica_world_size()
    if ranks > 1:
        raise ConfigError(
            f"a measured engine must run in this process; got {ranks} ranks (parallel.tp_size, "
            "parallel.cfg_size). Leave them at 1."
        )
    with console.Waiting("importing torch"):
        from phyai.engine import Engine, EngineArgs
    with console.Waiting("loading weights") as progress:
        return Engine(EngineArgs(setup.plugin, setup.args, setup.config), progress=progress)


def base_workload(subject: Subject, engine: Engine | None = None) -> Workload:
    """Return the checkpoint's own full request; without a cost model, what the sample leads to."""
    if subject.cost is not None:
        return subject.cost.workload()
    if engine is None or subject.setup.sample is None:
        return Workload()
    return Workload(steps=engine.adapter.prepare(subject.setup.sample).key.num_steps)


def request_of(subject: Subject, workload: Workload, seed: int) -> Any:
    """Return a request of a workload; without a cost model, copies of the preset's observation."""
    if subject.cost is not None:
        return subject.cost.request(workload, seed)
    sample = subject.setup.sample
    if sample is None:
        raise ConfigError(
            f"plugin {subject.setup.record.id!r} must have a cost model or a preset with a sample "
            "to be measured; got neither. Use a preset."
        )
    if workload.cameras or workload.tokens:
        raise ConfigError(
            f"--cameras and --tokens need a plugin that says what its requests cost; "
            f"{subject.setup.record.id!r} does not. Drop them."
        )
    known = subject.setup.manifest.capabilities.get("options")
    options = dict(sample.options)
    if known is None or "num_steps" in known:
        options["num_steps"] = workload.steps
    row = replace(sample, options=options)
    return row if workload.rows == 1 else [row] * workload.rows


def run(
    subject: Subject,
    engine: Engine,
    workloads: Sequence[Workload],
    *,
    repeat: int,
    warmup: int,
    seed: int,
    on_done: Callable[[Measurement], None] | None = None,
) -> list[Measurement]:
    """Measure each workload in turn, with progress on stderr."""
    from phyai.profile.sweep import measure

    measured = []
    for number, workload in enumerate(workloads):
        what = f"[{number + 1}/{len(workloads)}] {workload.label}"
        request = request_of(subject, workload, seed)
        with console.Waiting(what) as progress:
            done = measure(engine, workload, request, repeat=repeat, warmup=warmup, on_run=progress)
        if subject.cost is not None:
            done = replace(
                done,
                computed=subject.cost.stages(workload, itemsize=subject.itemsize),
                published=subject.cost.stages(workload, published=True, itemsize=subject.itemsize),
            )
        measured.append(done)
        if on_done is not None:
            on_done(done)
    return measured


def probe_machine(subject: Subject) -> list[Any]:
    """Return the machine's roofs, those of the subject's dtype first."""
    with console.Waiting("probing the machine"):
        from phyai.engine_config import resolve_device
        from phyai.profile.probe import DTYPES, probe

        device = resolve_device(subject.setup.config)
        name = subject.setup.config.device.dtype_name
        others = [dtype for dtype in ("bfloat16", "float32") if dtype != name]
        return probe(device, [*([name] if name in DTYPES else []), *others])


def save_json(path: Path, data: Any) -> None:
    """Write JSON, and say so on stderr."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(console.json_text(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--save must name a file that can be written; got {path}: {error}. Choose another."
        ) from error
    print(f"saved: {path}", file=sys.stderr)
