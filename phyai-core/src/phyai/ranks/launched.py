"""Ranks that a launcher started (torchrun, an RL framework): this process's place among them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from phyai.core_setup import mesh_of
from phyai.engine_config import EngineConfig, resolve_device
from phyai.errors import ConfigError
from phyai.parallel import ParallelService
from phyai.ranks.spawned import IDLE_S

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def join_launched(
    config: EngineConfig, variables: Mapping[str, str]
) -> tuple[EngineConfig, ParallelService]:
    """Join the ranks of this replica; return this rank's config and its groups.

    A process group that is there already is used; otherwise the launcher's variables say who this
    rank is (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``) and where they meet (``MASTER_ADDR``,
    ``MASTER_PORT``). With target ``cuda`` the rank computes on the device ``LOCAL_RANK``.

    Raises: ConfigError for variables that are missing or do not fit the config; CommTimeoutError
        for ranks that do not come.
    """
    mesh = mesh_of(config.parallel)
    if mesh.world == 1:
        return config, ParallelService.single()
    rank, world = _place(variables, mesh.world)
    if world != mesh.world:
        raise ConfigError(
            f"WORLD_SIZE must be the ranks of one replica, {mesh} = {mesh.world}; got {world}. "
            "Change parallel.tp_size and cfg_size, or the launcher's number of processes."
        )
    if not 0 <= rank < world:
        raise ConfigError(f"RANK must be in [0, {world}); got {rank}. Start it with a launcher.")
    runtime = config.runtime
    if rank:  # it takes up what rank 0 does, which may join requests
        runtime = runtime.replace(batch_wait_ms=0.0)
    device = config.device
    if device.target == "cuda":
        local = _number(variables, "LOCAL_RANK", default=rank % max(torch.cuda.device_count(), 1))
        device = device.replace(target=f"cuda:{local}")
    config = config.replace(device=device, runtime=runtime)
    placed = resolve_device(config)
    if placed.type == "cuda":
        torch.cuda.set_device(placed)
    parallel = ParallelService.start(
        mesh,
        rank,
        placed,
        timeout_s=config.parallel.timeout_s,
        control_timeout_s=IDLE_S,  # rank 0's program may do something else for a while
    )
    return config, parallel


def _place(variables: Mapping[str, str], world: int) -> tuple[int, int]:
    """Return rank and number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    missing = [name for name in ("RANK", "WORLD_SIZE", *ADDRESS) if not variables.get(name)]
    if missing:
        raise ConfigError(
            f"a replica of {world} ranks in mode 'external' must be started by a launcher, which "
            f"sets RANK, WORLD_SIZE, {' and '.join(ADDRESS)}; got none of {', '.join(missing)}. "
            "Start it with `torchrun`, or use DeploymentConfig.local()."
        )
    _number(variables, "MASTER_PORT")
    return _number(variables, "RANK"), _number(variables, "WORLD_SIZE")


def _number(variables: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = variables.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} must be an integer >= 0, as a launcher sets it; got {text!r}.")
    return int(text)
