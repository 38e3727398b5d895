"""Models whose actions follow from the observation alone: a test can work them out again."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from phyai.adapter import Adapter, AdapterArgs, observations
from phyai.engine import Engine
from phyai.manifest import AdapterManifest
from phyai.models.gr00t.main_gr00t import GrootAdapter
from phyai.models.gr00t.plugin import phyai_adapter as gr00t_manifest
from phyai.models.pi05.main_pi05 import PI05Adapter
from phyai.models.pi05.plugin import phyai_adapter as pi05_manifest
from phyai.solver import Direct
from phyai.types import Key, Observation, Prepared

SEED = 7


@dataclass
class MirrorArgs(AdapterArgs):
    max_batch_size: int = 4
    cameras: tuple[str, ...] = ()
    state_dim: int = 6
    action_dim: int = 6
    horizon: int = 10
    extra: dict[str, Any] = field(default_factory=dict)


def mirrored(seen: Observation, horizon: int, action_dim: int) -> np.ndarray[Any, Any]:
    """Return float32 [horizon, action_dim] that tells any two observations apart."""
    state = np.asarray(seen.state, np.float32).astype(np.float64)
    pictures = [np.asarray(seen.images[name], np.float64) for name in sorted(seen.images)]
    # Rows and channels weigh differently: turned or swapped pictures give other actions.
    marks = [p[0].mean() + 2 * p[:, 0].mean() + 3 * p[..., 0].mean() for p in pictures]
    text = zlib.crc32((seen.prompt or "").encode()) / 2**32
    base = np.resize(state, action_dim) + text + sum((i + 1) * m for i, m in enumerate(marks))
    return (base + np.arange(horizon)[:, None] / 16).astype(np.float32)


class _Given:
    prediction = "clean"

    def __call__(self, x: Any, step: Any, cache: Any) -> Any:
        return {"action": cache.inputs["noise.action"].clone()}


class MirrorAdapter(Adapter):
    """Gives ``mirrored`` as actions."""

    name = "mirror"
    args_cls = MirrorArgs
    args: MirrorArgs

    def expects(self) -> Mapping[str, Any]:
        known = {"cameras": self.args.cameras, "state_dim": self.args.state_dim, "prompt": True}
        return known | self.args.extra

    def prepare(self, request: Any) -> Prepared:
        rows = observations(request, max_rows=self.args.max_batch_size, options=("seed",))
        actions = [mirrored(row, self.args.horizon, self.args.action_dim) for row in rows]
        noise = torch.from_numpy(np.stack(actions))
        return Prepared({"noise.action": noise}, len(rows), Key(), meta=tuple(rows))

    def denoiser(self) -> Any:
        return _Given()

    def solver(self) -> Any:
        return Direct()


class SeededPi05(PI05Adapter):
    """Draws the noise of a request without a seed from ``SEED``: clients of robots send none."""

    name = "seeded_pi05"

    def prepare(self, request: Any) -> Prepared:
        return super().prepare(_seeded(request))


class SeededGroot(GrootAdapter):
    """The same for GR00T."""

    name = "seeded_gr00t"

    def prepare(self, request: Any) -> Prepared:
        return super().prepare(_seeded(request))


def _seeded(request: Any) -> Any:
    if isinstance(request, Observation):
        return replace(request, options={"seed": SEED, **request.options})
    return [_seeded(row) for row in request] if isinstance(request, list | tuple) else request


def register() -> None:
    """Make the models known to this process, once."""
    mirror = AdapterManifest(
        "mirror",
        "actions that follow from the observation",
        f"{__name__}:MirrorAdapter",
        f"{__name__}:MirrorArgs",
        capabilities={"options": ["seed"], "sessions": False},
    )
    Engine.register(MirrorAdapter, mirror)
    for cls, manifest in ((SeededPi05, pi05_manifest()), (SeededGroot, gr00t_manifest())):
        target = f"{__name__}:{cls.__name__}"
        named = replace(manifest, id=cls.name, target=target, aliases=(), architectures=())
        Engine.register(cls, replace(named, key_probes=()))
