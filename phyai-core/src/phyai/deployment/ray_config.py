"""RayConfig: which Ray cluster the replicas run on, and what each takes of it; torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from phyai.config_fields import Config, check_int, check_text, fail, raw_value


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class RayConfig(Config):
    """A Ray cluster, and what one rank of a replica takes of it.

    address: ``HOST:PORT`` of a running cluster's head, ``auto`` (one that runs on this machine) or
        ``local`` (a cluster of this machine alone, which ends with the engine). None = the cluster
        this process is connected to, else that of the variable ``RAY_ADDRESS``, else ``local``.
    num_cpus: logical CPUs; also the threads of a CPU replica, unless ``runtime.num_threads`` says.
    num_gpus: None = 1 for a CUDA engine, else 0. Below 1 several replicas share a GPU.

    >>> from phyai.deployment import RayConfig
    >>> RayConfig(address="10.0.0.5:6379", num_cpus=4).num_gpus is None
    True
    """

    address: str | None = field(default=None, metadata=_help("cluster; null = see RayConfig"))
    num_cpus: float = field(default=1.0, metadata=_help("logical CPUs of a rank"))
    num_gpus: float | None = field(
        default=None, metadata=_help("GPUs of a rank; null = 1 for a CUDA engine, else 0")
    )
    object_store_bytes: int | None = field(
        default=None, metadata=_help("object store of a local cluster; null = Ray's choice")
    )

    def __post_init__(self) -> None:
        check_text(self, "address", optional=True)
        if self.address is not None and "://" in self.address:
            fail(
                self,
                "address",
                "must be HOST:PORT, 'auto' or 'local'",
                " Ray Client (ray://) is not supported: run the engine on a node of the cluster.",
            )
        _check_amount(self, "num_cpus")
        _check_amount(self, "num_gpus", optional=True)
        check_int(self, "object_store_bytes", minimum=80 * 2**20, optional=True)


def _check_amount(config: RayConfig, name: str, *, optional: bool = False) -> None:
    """Raise ConfigError unless Ray can give that much: 0 to 1, or a whole number."""
    value = raw_value(config, name)
    if optional and value is None:
        return
    good = type(value) in (int, float) and math.isfinite(value) and value >= 0
    if not good or (value > 1 and value != int(value)):
        fail(config, name, "must be from 0 to 1, or a whole number")
