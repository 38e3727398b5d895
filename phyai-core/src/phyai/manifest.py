"""What an adapter says about itself before any of its code is loaded.

Layer 1, torch-free and JSON-serialisable: manifests are printed without importing a model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ADAPTER_API: tuple[int, int] = (1, 0)
"""Version of the adapter contract: majors must match, a plugin's minor must be <= core's."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A ready-made set of adapter arguments.

    build: ``pkg.mod:func``; ``func(cache_dir: Path, progress) -> dict`` of adapter arguments,
        making whatever files it needs below ``cache_dir``.
    sample: ``pkg.mod:func``; ``func(args: dict) -> Observation`` an example input; "" = none.

    >>> from phyai.manifest import Preset
    >>> Preset("tiny", "small random weights", build="my_package.presets:tiny").sample
    ''
    """

    name: str
    summary: str
    build: str
    sample: str = ""


@dataclass(frozen=True, slots=True)
class AdapterManifest:
    """Identity, entry points and capabilities of one adapter.

    target: ``pkg.mod:Class`` of the Adapter; args: ``pkg.mod:ArgsDataclass``.
    architectures: values of ``type`` / ``architectures`` in a checkpoint's config.json.
    key_probes: tensor-name suffixes only this model's checkpoints have.
    golden: ``pkg.mod:func``; ``func(path, root) -> list[GoldenRun]``, see phyai.golden; "" = none.
    cost: ``pkg.mod:func``; ``func(args) -> CostModel``, see phyai.cost; "" = none.
    media: ``pkg.mod:func``; ``func() -> MediaFiles``, see phyai.media_files; "" = no media.
    capabilities: open dict: kind, action_dim, horizon, cameras, control_hz, parallel, options and
        own_options (core's and the adapter's own), precisions ({name: aliases}), sessions, files
        (patterns of what is downloaded of a checkpoint; without them: JSON and safetensors), ...
        A plugin with media and without action_dim returns media alone.

    >>> from phyai.manifest import AdapterManifest
    >>> mine = AdapterManifest("mine", "my policy", "my_package.main:Mine", "my_package.main:Args")
    >>> AdapterManifest.from_json(mine.to_json()) == mine
    True
    """

    id: str
    summary: str
    target: str
    args: str
    api: tuple[int, int] = ADAPTER_API
    architectures: tuple[str, ...] = ()
    key_probes: tuple[str, ...] = ()
    capabilities: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    presets: tuple[Preset, ...] = ()
    weights_licence: str = ""
    golden: str = ""
    cost: str = ""
    media: str = ""

    def to_json(self) -> str:
        """Return the manifest as a JSON object; TypeError when a capability is not JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> AdapterManifest:
        """Return the manifest that ``to_json`` wrote."""
        data = json.loads(text)
        data["api"] = tuple(data["api"])
        for name in ("architectures", "key_probes", "aliases"):
            data[name] = tuple(data[name])
        data["presets"] = tuple(Preset(**preset) for preset in data["presets"])
        return cls(**data)
