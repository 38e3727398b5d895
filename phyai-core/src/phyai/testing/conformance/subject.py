"""What is under test: a plugin, its arguments, requests for it, and the engines over it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from phyai import plugins
from phyai.adapter import AdapterArgs
from phyai.addresses import tensors_of
from phyai.cli import run_setup
from phyai.engine import Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig, RuntimeConfig
from phyai.engine_core import EngineCore, max_rows
from phyai.errors import PhyaiError
from phyai.kernel_setup import installed_table
from phyai.manifest import AdapterManifest, Preset
from phyai.plugin_records import IN_PROCESS, PluginRecord
from phyai.testing import tolerances
from phyai.testing.capture import RecordingCapturer
from phyai.testing.conformance.check import Failure, NotApplicable
from phyai.testing.conformance.requests import observations_of, seeded
from phyai.testing.conformance.results import Arrays, arrays
from phyai.testing.parity import reference_policy
from phyai.types import Observation

ROWS = 4
"""Rows the kit's engines take at once: the smallest bucket that also holds a padded batch."""

Reference = Callable[[Any, Mapping[str, Any]], Any]


@dataclasses.dataclass(frozen=True)
class Given:
    """What an author gives; everything but ``manifest`` may be left out.

    manifest: a plugin id (``dist:id`` picks among duplicates) or the manifest itself.
    tiny_checkpoint: a folder, a mapping of adapter arguments, or AdapterArgs; None = the preset's.
    sample_requests: what the engine is sent; None = the preset's sample.
    golden_dir: a folder of golden cases.
    reference: (request, noise by leaf) -> the expected result.
    preset: name of the manifest's preset that stands in; None = the first one.
    backends: graph back ends that are compared with eager.
    """

    manifest: str | AdapterManifest
    tiny_checkpoint: Any = None
    sample_requests: Sequence[Any] | None = None
    golden_dir: str | Path | None = None
    reference: Reference | None = None
    preset: str | None = None
    tolerance: float = tolerances.REFERENCE_ATOL
    batch_tolerance: float = tolerances.BATCH_ATOL
    backends: tuple[str, ...] = ("recorded", "cuda")


class Subject:
    """Opens engines over one plugin and keeps those that checks share; ``close`` at the end."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self._cores: dict[str, EngineCore] = {}
        self._facts: dict[str, Any] = {}
        self.pristine: list[Any] = []
        """Copies of the sample requests from before any of them ran."""

    # ------------------------------------------------------------ the plugin

    @property
    def plugin(self) -> str:
        manifest = self.given.manifest
        return manifest.id if isinstance(manifest, AdapterManifest) else manifest

    @cached_property
    def record(self) -> PluginRecord:
        """The installed plugin. Raises: PluginError saying why it cannot be selected."""
        return plugins.find(self.plugin)

    @property
    def manifest(self) -> AdapterManifest:
        manifest = self.record.manifest
        assert manifest is not None  # find() loaded it
        return manifest

    @property
    def installed(self) -> bool:
        """Whether it is a distribution's; False for a class registered in this process."""
        return self.record.dist != IN_PROCESS

    def capability(self, name: str) -> Any:
        return self.manifest.capabilities.get(name)

    def takes_option(self, name: str) -> bool:
        return name in (self.capability("options") or ())

    # ------------------------------------------------------------ arguments and requests

    @cached_property
    def preset(self) -> Preset | None:
        """The preset that stands in for what the author did not give."""
        if self.given.preset is None and not self.manifest.presets:
            return None
        return run_setup.choose_preset(self.manifest, self.given.preset)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The adapter arguments as they were given, by name."""
        given = self.given.tiny_checkpoint
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            return {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
        if isinstance(given, Mapping):
            return dict(given)
        if given is not None:
            return {"checkpoint_dir": str(given)}
        if self.preset is not None:
            return run_setup.build_preset(self.record, self.preset)
        return {}

    @cached_property
    def args(self) -> AdapterArgs:
        """The adapter's arguments, with room for a batch where the adapter takes one."""
        cls = self.record.load_args()
        given = self.given.tiny_checkpoint
        args: Any = given if isinstance(given, cls) else cls(**self.values)
        if any(f.name == "max_batch_size" for f in dataclasses.fields(cls)):
            args = dataclasses.replace(args, max_batch_size=max(max_rows(args), ROWS))
        checked: AdapterArgs = args
        return checked

    @property
    def max_rows(self) -> int:
        return max_rows(self.args)

    @cached_property
    def requests(self) -> list[Any]:
        """The sample requests; seeded where the manifest declares option ``seed``.

        Raises: Failure when there is none.
        """
        found = list(self.given.sample_requests or ())
        if not found and self.preset is not None and self.preset.sample:
            sample = run_setup.load_function(self.preset.sample, self.record)
            found = [sample(dict(self.values))]
        if not found:
            raise Failure(
                "the kit must have a request to send; got none. Give the fixture sample_requests, "
                "or a preset with a sample in the manifest."
            )
        if self.takes_option("seed"):
            found = [seeded(request, 100 * number) for number, request in enumerate(found)]
        self.pristine = copy.deepcopy(found)
        return found

    @property
    def observations(self) -> list[Observation]:
        return observations_of(self.requests)

    def observation(self) -> Observation:
        """Return one sample. Raises: NotApplicable when all samples are model requests."""
        if not self.observations:
            raise NotApplicable("sample_requests hold no Observation")
        return self.observations[0]

    def need_rows(self, rows: int = 3) -> None:
        """Raise NotApplicable unless the adapter takes that many rows at once."""
        if self.max_rows < rows:
            raise NotApplicable("the adapter's arguments have no max_batch_size: one row at a time")

    # ------------------------------------------------------------ engines

    def config(self, *, device: str = "cpu", **runtime: Any) -> EngineConfig:
        return EngineConfig(
            device=DeviceConfig(target=device, params_dtype="float32"),
            runtime=RuntimeConfig(**{"graph_backend": "eager", **runtime}),
        )

    def reference_config(self, **runtime: Any) -> EngineConfig:
        """Return a config of reference kernels: a recording cannot follow compiled ones."""
        policy = reference_policy(installed_table(self.plugin))
        return self.config(**runtime).replace(kernel=KernelConfig(policy_config=policy))

    @property
    def exact(self) -> EngineCore:
        """The shared engine: eager, float32, CPU, every batch at its own size."""
        return self.shared("exact", lambda: self.open())

    @property
    def static(self) -> EngineCore:
        """The shared engine that pads batches to the buckets of graphs."""
        return self.shared("static", lambda: self.open(self.config(static_shapes=True)))

    def shared(self, name: str, make: Callable[[], EngineCore]) -> EngineCore:
        if name not in self._cores:
            self._cores[name] = make()
        return self._cores[name]

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` gave the first time; for facts that several checks read."""
        if name not in self._facts:
            self._facts[name] = make()
        return self._facts[name]

    def open(
        self, config: EngineConfig | None = None, args: AdapterArgs | None = None, **more: Any
    ) -> EngineCore:
        return EngineCore(self.plugin, args or self.args, config or self.config(), **more)

    @contextmanager
    def core(
        self, config: EngineConfig | None = None, args: AdapterArgs | None = None, **more: Any
    ) -> Iterator[EngineCore]:
        """Open an engine for one check."""
        core = self.open(config, args, **more)
        try:
            yield core
        finally:
            core.close()

    @contextmanager
    def recorded(self) -> Iterator[EngineCore]:
        """Open an engine that records its regions and replays them, as a GPU would."""
        capturer = RecordingCapturer(num_warmup_iters=1)
        with self.core(self.reference_config(), capturer=capturer) as core:

            def static() -> Iterator[Any]:
                yield from core.services.memory.buffers().values()
                yield from tensors_of(core.runner.model_objects(core.runner.network)).values()

            capturer.static = static
            yield core

    @contextmanager
    def engine(self, **runtime: Any) -> Iterator[Engine]:
        """Open what users hold: an Engine, with threads and futures."""
        with Engine(EngineArgs(self.plugin, self.args, self.config(**runtime))) as engine:
            yield engine

    def close(self) -> None:
        while self._cores:
            self._cores.popitem()[1].close()

    # ------------------------------------------------------------ results

    def solo(self, number: int) -> Arrays:
        """Return the result of sample ``number`` on the shared engine."""
        return step(self.exact, self.requests[number], f"sample request {number}")

    @cached_property
    def expected(self) -> tuple[Arrays, ...]:
        """The result of every sample request, each computed once."""
        return tuple(self.solo(number) for number in range(len(self.requests)))


def step(core: EngineCore | Engine, request: Any, label: str = "a request") -> Arrays:
    """Return the arrays of a result. Raises: Failure when the request does not succeed."""
    return arrays(result_of(core, request, label))


def result_of(core: EngineCore | Engine, request: Any, label: str = "a request") -> Any:
    """Return a result. Raises: Failure when the request does not succeed."""
    try:
        return core.step(request)
    except PhyaiError as error:
        raise Failure(f"{label} must succeed; got {type(error).__name__}: {error}") from error
    except Exception as error:
        raise Failure(
            f"{label} must succeed; got {type(error).__name__}: {error}. See the traceback."
        ) from error
