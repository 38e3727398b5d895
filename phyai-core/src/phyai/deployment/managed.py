"""Managed modes of Engine: where replicas run, and the pool that runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from phyai.deployment.config import DeploymentConfig, replica_devices
from phyai.engine_config import EngineConfig, resolve_device
from phyai.errors import ConfigError
from phyai.plugins import find

if TYPE_CHECKING:
    from phyai.adapter import AdapterArgs
    from phyai.deployment.pool import ReplicaPool
    from phyai.plugin_records import PluginRecord


def open_pool(
    mode: Literal["local", "ray"],
    plugin: str,
    plugin_args: AdapterArgs,
    config: EngineConfig,
    deployment: DeploymentConfig,
) -> ReplicaPool:
    """Return a pool that is not started yet.

    Raises: ConfigError for a plugin that other processes cannot find, for devices that are not
        there, and for batches that wait longer than a worker may be silent; what finding the plugin
        raises; TypeError for arguments of another plugin.
    """
    from phyai.deployment.pool import PoolSpec

    devices = devices_of(deployment, config) if mode == "local" else ()
    check_patience(deployment, config)
    record = find(plugin)
    _check_installed(record)
    expected = record.load_args()
    if not isinstance(plugin_args, expected):
        raise TypeError(
            f"plugin_args of plugin {plugin!r} must be {expected.__name__}; "
            f"got {type(plugin_args).__name__}."
        )
    spec = PoolSpec(
        record.qualified_id,
        plugin_args,
        config,
        record.version,
        deployment,
        devices,
    )
    if mode == "ray":
        from phyai.deployment.ray_pool import RayPool

        return RayPool(spec)
    from phyai.deployment.local_pool import LocalPool

    return LocalPool(spec)


def devices_of(deployment: DeploymentConfig, config: EngineConfig) -> tuple[tuple[str, ...], ...]:
    """Return the device names of every replica; without given ones, the first that are there.

    Raises: ConfigError when there are too few, when one is not there, and when a given one
        contradicts the config.
    """
    replicas = replica_devices(deployment, config.parallel)
    target = config.device.target
    if replicas is not None:
        for device in (name for names in replicas for name in names):
            check_placed(device, target)
            resolve_device(config.replace(device=config.device.replace(target=device)))
        return replicas
    world = config.parallel.infer_replica_world_size()
    if resolve_device(config).type == "cpu":
        return (("cpu",) * world,) * deployment.replica_count
    import torch

    count, there = deployment.replica_count, torch.cuda.device_count()
    if target != "cuda" and count * world == 1:
        return ((target,),)
    if count * world > there or target != "cuda":
        shown = "replica_count" if world == 1 else f"replica_count * {world} ranks"
        raise ConfigError(
            f"{shown} must be at most the {there} visible CUDA devices; got {count * world} with "
            f"target {target!r}. Give the devices, with share_devices=True for several on one."
        )
    names = [f"cuda:{index}" for index in range(count * world)]
    return tuple(tuple(names[r * world : (r + 1) * world]) for r in range(count))


def check_placed(device: str, target: str) -> None:
    """Raise ConfigError when a deployment's device contradicts the config's: one is a mistake."""
    if device == target or (target == "cuda" and device.startswith("cuda:")):
        return
    raise ConfigError(
        f"DeploymentConfig.devices must agree with EngineConfig.device.target {target!r}; got "
        f"{device!r}. Change one of them (PHYAI_DEVICE overrides the target)."
    )


def check_patience(deployment: DeploymentConfig, config: EngineConfig) -> None:
    """Raise ConfigError when a worker that waits for a batch would be killed as stuck."""
    limit, wait_ms = deployment.supervision.request_timeout_s, config.runtime.batch_wait_ms
    if limit is not None and wait_ms >= 1e3 * limit:
        raise ConfigError(
            f"runtime.batch_wait_ms must be less than request_timeout_s ({limit:g} s), or a worker "
            f"that waits for a batch is killed as stuck; got {wait_ms:g}. Change one of them."
        )


def _check_installed(record: PluginRecord) -> None:
    if record.adapter_class is not None:
        raise ConfigError(
            f"plugin {record.id!r} must be installed to run in worker processes, which find "
            "plugins by their entry point (group 'phyai.plugins'); got a class registered in this "
            "process. Put it into a package, see docs/plugins.md, or use DeploymentConfig.inline()."
        )
