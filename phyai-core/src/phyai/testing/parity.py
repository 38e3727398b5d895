"""An engine's own kernels against the reference ones: same weights, inputs and noises.

The two engines run one after the other and only x after each solver step is kept, so that nothing
needs memory for two models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import AdapterArgs
from phyai.engine_config import BackendConfig, EngineConfig, KernelConfig
from phyai.engine_core import EngineCore
from phyai.errors import ConfigError, PluginContractError
from phyai.kernel_setup import installed_table
from phyai.kernels import KernelTable
from phyai.services import Progress, no_progress

Trace = Mapping[str, Sequence[Tensor]]
"""Leaf -> x after each solver step, [B, ...] float32 on the CPU; the last one is the result."""
MakeRequest = Callable[[int], Any]
"""Seed -> request; the same seed gives an equal request, another seed other noise."""


@dataclass(frozen=True, slots=True)
class StepParity:
    """x after one solver step (from 1), over all noises and rows.

    max_abs: largest |own - reference|.  cosine: smallest of any row; median_cosine: the middle one.
    noise: the seed with the smallest cosine.
    """

    leaf: str
    step: int
    max_abs: float
    cosine: float
    median_cosine: float
    noise: int


@dataclass(frozen=True)
class Parity:
    """The comparison of every step.

    own, reference: op -> kernels the two engines chose.
    """

    steps: tuple[StepParity, ...]
    noises: int
    own: Mapping[str, tuple[str, ...]]
    reference: Mapping[str, tuple[str, ...]]

    @property
    def results(self) -> tuple[StepParity, ...]:
        """The last step of each leaf: what leaves the solver."""
        last = {entry.leaf: entry for entry in self.steps}
        return tuple(last.values())

    def ok(self, min_cosine: float, max_abs: float | None = None) -> bool:
        """Return whether every step keeps the cosine, and every result the largest error."""
        cosines = all(entry.cosine >= min_cosine for entry in self.steps)  # False for NaN
        return cosines and (
            max_abs is None or all(entry.max_abs <= max_abs for entry in self.results)
        )


def reference_policy(table: KernelTable) -> Mapping[str, Any]:
    """Return the kernel policy that takes the reference row of every op, and quantises nothing."""
    overrides = []
    for op in table.ops:
        (row,) = (row for row in table.rows(op) if row.reference)
        overrides.append({"id": f"reference of {op}", "match": {"op": op}, "use": row.name})
    return {"schema": "phyai.kernel/v1", "overrides": overrides}


def reference_config(config: EngineConfig, plugin: str) -> EngineConfig:
    """Return the config with reference kernels only, run eagerly; device and dtype stay."""
    return config.replace(
        backends=BackendConfig(),
        kernel=KernelConfig(policy_config=reference_policy(installed_table(plugin))),
        runtime=config.runtime.replace(
            graph_backend="eager", static_shapes=None, force_linear_kernel=None
        ),
    )


def against_reference(
    plugin: str,
    args: AdapterArgs,
    config: EngineConfig,
    request: MakeRequest,
    *,
    noises: int = 20,
    progress: Progress = no_progress,
) -> Parity:
    """Run ``noises`` requests with the kernels of ``config``, and again with reference kernels.

    config: used as it is, PHYAI_* variables included by the caller.
    Raises: ConfigError for less than one noise.
    """
    if noises < 1:
        raise ConfigError(f"noises must be at least 1; got {noises!r}. Ask for one or more.")
    settings = (config, reference_config(config, plugin))
    runs: list[list[Trace]] = []
    chosen: list[Mapping[str, tuple[str, ...]]] = []
    for number, setting in enumerate(settings):
        with _core(plugin, args, setting) as core:
            runs.append([])
            for seed in range(noises):
                progress(number * noises + seed, 2 * noises, ("own", "reference")[number])
                runs[-1].append(trace_of(core, request(seed)))
            chosen.append(_kernels(core))
            if number == 1:
                _check_reference(core)
    return Parity(tuple(compare(*runs)), noises, *chosen)


@contextmanager
def _core(plugin: str, args: AdapterArgs, config: EngineConfig) -> Iterator[EngineCore]:
    core = EngineCore(plugin, args, config)
    try:
        yield core
    finally:
        core.close()


def trace_of(core: EngineCore, request: Any) -> Trace:
    """Return x after each solver step of one request.

    Steps run eagerly, for the recorder hears nothing else; where the engine replays graphs, the
    result is that of the graphs.
    """
    leaves = _leaves(core, request)
    names = [f"steps.{leaf}.x" for leaf in leaves] + [f"result.{leaf}" for leaf in leaves]
    recorder = core.services.profile.recorder
    with recorder.recording(names) as records:
        core.step(request)
    if core.services.graphs.backend != "eager":
        with recorder.recording([f"result.{leaf}" for leaf in leaves]) as replayed:
            core.step(request)
        records.update(replayed)
    return {leaf: [*records[f"steps.{leaf}.x"][1:], *records[f"result.{leaf}"]] for leaf in leaves}


def _leaves(core: EngineCore, request: Any) -> list[str]:
    tensors = core.adapter.prepare(request).tensors
    found = [name.removeprefix("noise.") for name in tensors if name.startswith("noise.")]
    if not found:
        raise PluginContractError(
            f"adapter {core.adapter.name!r} must draw its noise in prepare() (noise.<leaf>) to be "
            "compared step by step; got a request without."
        )
    return found


def _kernels(core: EngineCore) -> dict[str, tuple[str, ...]]:
    """Return op -> the kernels that were chosen for it, sorted."""
    found: dict[str, set[str]] = {}
    for choice in core.services.kernels.choices:
        if choice.row is not None:
            found.setdefault(choice.op, set()).add(choice.row)
    return {op: tuple(sorted(names)) for op, names in sorted(found.items())}


def _check_reference(core: EngineCore) -> None:
    """Raise ConfigError when the reference engine runs another kernel: it would prove nothing."""
    table = core.services.kernels
    truth = {row.name for op in table.ops for row in table.rows(op) if row.reference}
    others = sorted({c.row for c in table.choices if c.row is not None} - truth)
    if others:
        raise ConfigError(
            f"the reference engine must run reference kernels only; got {', '.join(others)}. "
            "Remove what forces them."
        )


def compare(own: Sequence[Trace], reference: Sequence[Trace]) -> Iterator[StepParity]:
    """Yield one entry per leaf and step over traces of equal noises, in the order of the steps."""
    for leaf, steps in own[0].items():
        for step in range(len(steps)):
            pairs = [
                (a[leaf][step].double(), b[leaf][step].double())
                for a, b in zip(own, reference, strict=True)
            ]
            largest = [float((a - b).abs().max()) for a, b in pairs]
            cosines = [float(_cosines(a, b).min()) for a, b in pairs]
            worst = int(torch.tensor(cosines).nan_to_num(-2.0).argmin())
            yield StepParity(
                leaf,
                step + 1,
                max(largest, key=lambda value: (value != value, value)),  # a NaN is the largest
                cosines[worst],
                median(cosines),
                worst,
            )


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each row; 1 where both are zero."""
    a, b = a.flatten(1), b.flatten(1)
    norms = a.norm(dim=1) * b.norm(dim=1)
    same = (a == b).all(dim=1)
    return torch.where(same, torch.ones_like(norms), (a * b).sum(dim=1) / norms)
