"""Parts of a core's start-up: kernels, weights, the back end of its graphs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from phyai.adapter import Adapter
from phyai.engine_config import EngineConfig
from phyai.errors import CapacityError, ConfigError
from phyai.kernels import native
from phyai.memory import is_out_of_memory
from phyai.parallel import Mesh, check_axes
from phyai.services import Progress
from phyai.sessions import declares_sessions

if TYPE_CHECKING:
    from phyai.engine_config import ParallelConfig
    from phyai.plugin_records import PluginRecord
    from phyai.timers import Profile
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")


def mesh_of(parallel: ParallelConfig) -> Mesh:
    """Return the ranks of one replica."""
    return Mesh(cfg=parallel.cfg_size, tp=parallel.tp_size or 1)


def check_ranks(record: PluginRecord, parallel: ParallelConfig, started: Mesh | None) -> None:
    """Raise ConfigError when a plugin cannot run on the configured ranks, or they are not here.

    started: the ranks that are here; None = they are yet to be started.
    """
    wanted = mesh_of(parallel)
    if wanted.world > 1:
        cls: Any = record.load_class()
        check_axes(wanted, record.id, cls.parallel)
    if started is not None and wanted != started:
        raise ConfigError(
            f"parallel sizes ({wanted}) must be those of the ranks that were started; got "
            f"{started}. Use DeploymentConfig.local(), or start every rank with a launcher."
        )
    offered = record.manifest.capabilities if record.manifest else {}
    if wanted.world > 1 and declares_sessions(offered):
        raise ConfigError(
            f"plugin {record.id!r} keeps sessions, so its replicas must have one rank; got "
            f"{wanted.world}. Set the parallel sizes to 1, and raise deployment.replica_count."
        )


def on_device(device: torch.device) -> None:
    """Have this thread's CUDA calls go to the device: which one is current is a thread's own."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def compile_kernels(device: torch.device, progress: Progress) -> None:
    """Have the C++ kernels ready before a layer asks for them; the first time that takes long."""
    if device.type == "cpu" and not native.built():
        progress(0, 1, "compiling C++ kernels, once")
        native.available()
        progress(1, 1, "compiled C++ kernels")


def load_weights(adapter: Adapter, profile: Profile) -> LoadReport | None:
    """Have the adapter load; what this rank read is counted as ``weight_bytes_read``."""
    try:
        report = adapter.load()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"weights of plugin {adapter.name!r} must fit the memory of the device; got {error}. "
            "Check the sizes in the checkpoint's config, or use a larger device."
        ) from error
    if report is not None:
        profile.count("weight_bytes_read", report.bytes_read)
    return report


def graph_backend(config: EngineConfig, device: torch.device) -> Any:
    """Return the back end of a config on a device; a tensor dump needs the Python of eager."""
    wanted = _wanted_backend(config, device)
    if config.runtime.debug_tensor_dump_dir is None or wanted == "eager":
        return wanted
    log.warning("graph back end %s is left out: a tensor dump needs eager regions", wanted)
    return "eager"


def _wanted_backend(config: EngineConfig, device: torch.device) -> str:
    backend = config.runtime.graph_backend
    if backend == "cuda" and not config.runtime.use_cuda_graph:
        return "eager"
    if backend != "auto":
        if backend == "cuda" and device.type != "cuda":
            raise ConfigError(
                f"runtime.graph_backend 'cuda' needs a CUDA device; got {str(device)!r}. "
                "Use 'auto', 'eager' or 'inductor'."
            )
        return backend
    return "cuda" if device.type == "cuda" and config.runtime.use_cuda_graph else "eager"
