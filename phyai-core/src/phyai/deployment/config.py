"""DeploymentConfig: replicas, their devices and their supervision; torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from phyai.config_fields import (
    Config,
    check_bool,
    check_choice,
    check_instance,
    check_int,
    check_seconds,
    fail,
)
from phyai.deployment.ray_config import RayConfig
from phyai.engine_config import ParallelConfig
from phyai.errors import ConfigError

Mode = Literal["auto", "inline", "local", "ray", "external"]
ResolvedMode = Literal["inline", "local", "ray", "external"]

_DEVICE_NAME = re.compile(r"cpu|cuda:(0|[1-9]\d*)")


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class WorkerSupervisorConfig(Config):
    """Patience with worker processes, in seconds.

    >>> from phyai.deployment import WorkerSupervisorConfig
    >>> WorkerSupervisorConfig(startup_timeout_s=1800).max_restarts
    3
    """

    startup_timeout_s: float = field(default=900.0, metadata=_help("until every rank is ready"))
    shutdown_timeout_s: float = field(default=10.0, metadata=_help("until a worker is killed"))
    heartbeat_s: float = field(default=2.0, metadata=_help("between signs of life"))
    max_restarts: int = field(default=3, metadata=_help("restarts of one replica per window"))
    restart_window_s: float = field(default=300.0, metadata=_help("window of max_restarts"))
    request_timeout_s: float | None = field(default=None, metadata=_help("null = no limit"))

    def __post_init__(self) -> None:
        check_seconds(self, "startup_timeout_s", "heartbeat_s", "restart_window_s")
        check_seconds(self, "shutdown_timeout_s", zero_ok=True)
        check_seconds(self, "request_timeout_s", optional=True)
        check_int(self, "max_restarts", minimum=0)


@dataclass(frozen=True, slots=True)
class DeploymentConfig(Config):
    """How many complete model copies run, on which devices, started by whom.

    devices: visible CUDA indices or names (``cpu``, ``cuda:2``); device k of replica r is
        ``devices[r * world + k]``. A CUDA device may repeat only with ``share_devices``; the
        CPU always may.

    >>> from phyai import DeploymentConfig
    >>> DeploymentConfig.local(devices=("cpu", "cpu"), replica_count=2).mode
    'local'
    """

    mode: Mode = field(default="auto", metadata=_help("who starts the ranks"))
    replica_count: int = field(default=1, metadata=_help("complete model copies"))
    devices: tuple[int | str, ...] | None = field(
        default=None, metadata=_help("CUDA indices or names; null = the first visible ones")
    )
    output_rank: int = field(default=0, metadata=_help("rank whose results count"))
    auto_start: bool = field(default=True, metadata=_help("start workers in the constructor"))
    process_config: WorkerSupervisorConfig | None = field(
        default=None, metadata=_help("null = the defaults")
    )
    share_devices: bool = field(default=False, metadata=_help("a CUDA device may repeat"))
    result_device: Literal["cpu"] | None = field(
        default=None, metadata=_help("cpu = results as host tensors; null = where computed")
    )
    retry_on_worker_death: bool = field(
        default=False, metadata=_help("run a dead worker's requests again elsewhere")
    )
    ray_config: RayConfig | None = field(
        default=None, metadata=_help("mode ray: its cluster; null = the defaults")
    )

    def __post_init__(self) -> None:
        check_choice(self, "mode", get_args(Mode))
        check_int(self, "replica_count", minimum=1)
        check_int(self, "output_rank", minimum=0)
        check_bool(self, "auto_start", "share_devices", "retry_on_worker_death")
        check_instance(self, "process_config", WorkerSupervisorConfig, optional=True)
        check_choice(self, "result_device", ("cpu",), optional=True)
        check_instance(self, "ray_config", RayConfig, optional=True)
        if self.ray_config is not None and self.mode != "ray":
            fail(self, "ray_config", f"must be None in mode {self.mode!r}", " Use mode 'ray'.")
        if self.mode == "ray" and self.devices is not None:
            fail(
                self,
                "devices",
                "must be None in mode 'ray', which chooses them",
                " Say what a replica needs: RayConfig(num_cpus=..., num_gpus=...).",
            )
        if self.devices is not None:
            self._check_devices()
        if self.mode in ("inline", "external"):
            remedy = f" Use mode 'local' for replicas, or leave it out with {self.mode!r}."
            if self.replica_count != 1:
                fail(self, "replica_count", f"must be 1 in mode {self.mode!r}", remedy)
            if self.devices is not None:
                fail(
                    self,
                    "devices",
                    f"must be None in mode {self.mode!r}",
                    " Choose the device by EngineConfig.device.target.",
                )

    def _check_devices(self) -> None:
        given: Any = self.devices
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            fail(self, "devices", "must be a non-empty tuple of CUDA indices and device names")
        object.__setattr__(self, "devices", tuple(given))
        for device in given:
            index = type(device) is int and device >= 0
            if not index and not (type(device) is str and _DEVICE_NAME.fullmatch(device)):
                fail(
                    self,
                    "devices",
                    f"must hold CUDA indices >= 0, 'cpu' or 'cuda:N'; {device!r} is none of them",
                )
        if len(given) % self.replica_count:
            fail(
                self,
                "devices",
                f"must divide among replica_count = {self.replica_count} replicas",
                " Give replica_count * ranks per replica devices.",
            )
        names = [device_name(d) for d in given if device_name(d) != "cpu"]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice and not self.share_devices:
            fail(
                self,
                "devices",
                f"must not repeat a CUDA device; {', '.join(twice)} repeats",
                " Pass share_devices=True to share it.",
            )

    @classmethod
    def local(
        cls,
        devices: Sequence[int | str] | None = None,
        replica_count: int = 1,
        **options: Any,
    ) -> DeploymentConfig:
        """Return a deployment whose workers this process spawns."""
        given: Any = devices  # the check turns it into a tuple, or says what is wrong with it
        return cls(mode="local", devices=given, replica_count=replica_count, **options)

    @classmethod
    def ray(
        cls,
        replica_count: int = 1,
        *,
        address: str | None = None,
        num_cpus: float = 1.0,
        num_gpus: float | None = None,
        **options: Any,
    ) -> DeploymentConfig:
        """Return a deployment on a Ray cluster, which may span hosts; see ``RayConfig``.

        >>> from phyai.deployment import DeploymentConfig
        >>> DeploymentConfig.ray(replica_count=2, address="auto").ray_config.address
        'auto'
        """
        cluster = RayConfig(address=address, num_cpus=num_cpus, num_gpus=num_gpus)
        options.setdefault("ray_config", cluster)
        return cls(mode="ray", replica_count=replica_count, **options)

    @classmethod
    def external(cls, **options: Any) -> DeploymentConfig:
        """Return a deployment whose ranks a launcher (torchrun, an RL framework) has started."""
        return cls(mode="external", **options)

    @classmethod
    def inline(cls, **options: Any) -> DeploymentConfig:
        """Return a deployment inside the calling process."""
        return cls(mode="inline", **options)

    @property
    def supervision(self) -> WorkerSupervisorConfig:
        """``process_config``, or the defaults."""
        return self.process_config or WorkerSupervisorConfig()


def device_name(device: int | str) -> str:
    """Return ``cuda:N`` for an index, a name as it is."""
    return f"cuda:{device}" if isinstance(device, int) else device


def resolve_mode(
    deployment: DeploymentConfig | None, parallel: ParallelConfig, environ: Mapping[str, str]
) -> ResolvedMode:
    """Return who runs the ranks: inline, local, ray or external.

    auto = external under a launcher (``WORLD_SIZE`` > 1 in ``environ``), else local for several
    replicas, several ranks or given devices, else inline.
    Raises: ConfigError for a bad ``WORLD_SIZE``, an ``output_rank`` outside the replica, a device
    count that does not fit, or several ranks inline.
    """
    deployment = deployment or DeploymentConfig()
    world = parallel.infer_replica_world_size()
    mode: ResolvedMode
    if deployment.mode != "auto":
        mode = deployment.mode
    elif _launched_world(environ) > 1:
        mode = "external"
    elif deployment.replica_count > 1 or world > 1 or deployment.devices is not None:
        mode = "local"
    else:
        mode = "inline"
    if mode == "inline" and world > 1:
        raise ConfigError(
            f"DeploymentConfig.mode 'inline' must have one rank; got a replica of {world} ranks. "
            "Use mode 'local', or set the parallel sizes to 1."
        )
    if mode == "external" and (deployment.replica_count > 1 or deployment.devices is not None):
        raise ConfigError(
            "DeploymentConfig.mode 'auto' resolves to 'external' because WORLD_SIZE is set, which "
            f"excludes replicas and devices; got replica_count={deployment.replica_count}, "
            f"devices={deployment.devices!r}. Unset WORLD_SIZE or use mode 'local'."
        )
    count = parallel.tp_size or 1  # cfg ranks above 0 have the unconditional branch alone
    if deployment.output_rank >= count:
        fail(deployment, "output_rank", f"must be in [0, {count}), the ranks with cfg rank 0")
    replica_devices(deployment, parallel)
    return mode


def replica_devices(
    deployment: DeploymentConfig, parallel: ParallelConfig
) -> tuple[tuple[str, ...], ...] | None:
    """Return the device names of each replica, or None when ``devices`` was left out.

    Raises: ConfigError when the number of devices is not replica_count * ranks per replica.
    """
    if deployment.devices is None:
        return None
    world = parallel.infer_replica_world_size()
    needed = deployment.replica_count * world
    if len(deployment.devices) != needed:
        fail(
            deployment,
            "devices",
            f"must hold replica_count * ranks per replica = {deployment.replica_count} * {world} "
            f"= {needed} devices",
            " Change replica_count or the devices.",
        )
    names = [device_name(device) for device in deployment.devices]
    return tuple(tuple(names[r * world : (r + 1) * world]) for r in range(deployment.replica_count))


def _launched_world(environ: Mapping[str, str]) -> int:
    text = environ.get("WORLD_SIZE", "").strip() or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE must be an integer >= 1, as a launcher sets it; got {text!r}."
        )
    return int(text)
