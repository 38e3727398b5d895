"""PhyAI: an inference runtime for Physical AI. Importing this imports no torch.

Public names resolve on first use, so `import phyai` stays cheap. The package path is extended
because `phyai.models.*` ships in other distributions, which may lie in other folders.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING

__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from phyai.deployment import DeploymentConfig
    from phyai.engine import Engine, EngineArgs, Entry, EntryArgs
    from phyai.engine_config import (
        BackendConfig,
        DeviceConfig,
        EngineConfig,
        KernelConfig,
        ParallelConfig,
        RuntimeConfig,
        get_engine_config,
        init_engine_config,
        set_engine_config,
    )
    from phyai.errors import EngineUnavailableError, PhyaiError
    from phyai.types import ActionChunk, Observation

    __version__: str

_HOMES = {
    "ActionChunk": "phyai.types",
    "BackendConfig": "phyai.engine_config",
    "DeploymentConfig": "phyai.deployment",
    "DeviceConfig": "phyai.engine_config",
    "Engine": "phyai.engine",
    "EngineArgs": "phyai.engine",
    "EngineConfig": "phyai.engine_config",
    "EngineUnavailableError": "phyai.errors",
    "Entry": "phyai.engine",
    "EntryArgs": "phyai.engine",
    "KernelConfig": "phyai.engine_config",
    "Observation": "phyai.types",
    "ParallelConfig": "phyai.engine_config",
    "PhyaiError": "phyai.errors",
    "RuntimeConfig": "phyai.engine_config",
    "get_engine_config": "phyai.engine_config",
    "init_engine_config": "phyai.engine_config",
    "set_engine_config": "phyai.engine_config",
}

__all__ = [
    "ActionChunk",
    "BackendConfig",
    "DeploymentConfig",
    "DeviceConfig",
    "Engine",
    "EngineArgs",
    "EngineConfig",
    "EngineUnavailableError",
    "Entry",
    "EntryArgs",
    "KernelConfig",
    "Observation",
    "ParallelConfig",
    "PhyaiError",
    "RuntimeConfig",
    "__version__",
    "get_engine_config",
    "init_engine_config",
    "set_engine_config",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        value: object = _installed_version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("phyai-core")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"
