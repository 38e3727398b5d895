"""The connection of this process to a Ray cluster, which its engines share."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from phyai.deployment import ray_local
from phyai.deployment.ray_config import RayConfig
from phyai.errors import ConfigError, MissingDependency

log = logging.getLogger("phyai")

REACH_S = 10.0


class _Keeper:
    """The thread that connects this process, and disconnects it in the end.

    It lives in between: the kernel ends a local cluster's processes with the thread that started
    them, and a caller's thread may be a short one.
    """

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._start, self._stop = start, stop
        self._started, self._ending = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="phyai-ray-cluster", daemon=True)

    def start(self) -> None:
        """Connect. Raises: what went wrong."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Disconnect; returns when it is done."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._start()
        except BaseException as error:
            self._error = error
            with contextlib.suppress(Exception):
                self._stop()
            return
        finally:
            self._started.set()
        self._ending.wait()
        with contextlib.suppress(Exception):
            self._stop()


@dataclass
class _Shared:
    """Ray has one connection per process; so has this record of it.

    users: engines that use it.  keeper: None when the user connected.  local: whether it is a
    cluster that ends with the last engine.
    """

    users: int = 0
    keeper: _Keeper | None = None
    local: bool = False


_lock = threading.RLock()
_shared = _Shared()


@dataclass
class Resources:
    """What Ray gives one rank: logical CPUs and GPUs."""

    num_cpus: float
    num_gpus: float

    def as_bundle(self) -> dict[str, float]:
        found = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}
        return {name: amount for name, amount in found.items() if amount}


def import_ray() -> Any:
    """Return the module. Raises: MissingDependency."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependency(
            "mode 'ray' needs Ray; got an environment without it. "
            "Install it with `pip install 'phyai-core[ray]'`."
        ) from error
    return ray


def _join(ray: Any, address: str, options: dict[str, Any]) -> None:
    """Connect to a running cluster; Ray itself would try an address where none is for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    ray.init(address=address, **options)


class Connection:
    """One engine's use of the cluster; ``release`` it once.

    Raises: ConfigError for a cluster that cannot be reached, is another one than this process is
        connected to, or is a local one with too little for ``replicas`` of so many ranks.
    """

    def __init__(
        self, config: RayConfig, resources: Resources, ranks: int = 1, replicas: int = 1
    ) -> None:
        self.ray = import_ray()
        self._released = False
        with _lock:
            if self.ray.is_initialized():
                self._check_same(config)
            else:
                self._connect(config, resources, ranks * replicas)
            _shared.users += 1
            try:
                self._check_room(resources, ranks, replicas)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Disconnect with the last engine, unless the user connected; ends a local cluster."""
        with _lock:
            if self._released:
                return
            self._released = True
            _shared.users -= 1
            if _shared.users == 0 and _shared.keeper is not None:
                keeper, _shared.keeper, _shared.local = _shared.keeper, None, False
                keeper.stop()

    @property
    def local(self) -> bool:
        """Whether an engine of this process started the cluster."""
        return _shared.local

    def reserve(self, resources: Resources, ranks: int) -> tuple[Any, list[dict[str, Any]]]:
        """Return (placement group or None, the options that place the actor of each rank).

        Several ranks of a replica lie on one node, one bundle each; replicas are spread. What is
        reserved may come later, when there is room.
        """
        if ranks == 1:
            return None, [{"scheduling_strategy": "SPREAD"}]
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group([resources.as_bundle()] * ranks, strategy="STRICT_PACK")
        places = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            for rank in range(ranks)
        ]
        return group, [{"scheduling_strategy": place} for place in places]

    def room(self, resources: Resources, ranks: int) -> str:
        """Return in a sentence what a replica needs and the nodes have; nothing if Ray is mute."""
        with contextlib.suppress(Exception):
            names = list(resources.as_bundle())
            need = _amounts({n: ranks * a for n, a in resources.as_bundle().items()}, names)
            totals = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
            nodes = "; ".join(_amounts(total, names) for total in totals)
            free = _amounts(self.ray.available_resources(), names)
            ranked = f" for its {ranks} ranks, on one node" if ranks > 1 else ""
            return f"It needs {need}{ranked}; the nodes have {nodes}, and {free} is free in all."
        return ""

    def give_back(self, group: Any) -> None:
        """Free what ``reserve`` took."""
        if group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):
                remove_placement_group(group)

    # ------------------------------------------------------------ internals

    def _connect(self, config: RayConfig, resources: Resources, ranks: int) -> None:
        address = config.address or os.environ.get("RAY_ADDRESS") or "local"
        RayConfig(address=address)  # the variable is held to the same rules
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if address == "local":
            cpus = max(os.cpu_count() or 1, math.ceil(resources.num_cpus * ranks))
            start = partial(ray_local.start, self.ray, cpus, config.object_store_bytes, **options)
            stop = partial(ray_local.stop, self.ray)
        else:
            start = partial(_join, self.ray, address, options)
            stop = self.ray.shutdown
        keeper = _Keeper(start, stop)
        try:
            keeper.start()
        except Exception as error:
            raise ConfigError(
                f"RayConfig.address must be a cluster that can be reached; got {address!r}: "
                f"{type(error).__name__}: {error}. Start its head (`ray start --head`), or leave "
                "the address out for a cluster of this machine alone."
            ) from error
        _shared.keeper, _shared.local = keeper, address == "local"

    def _check_same(self, config: RayConfig) -> None:
        here = self.ray.get_runtime_context().gcs_address
        wanted = config.address
        if wanted in (None, "auto", here) or (wanted == "local" and _shared.local):
            return
        raise ConfigError(
            f"RayConfig.address must be None or that of the cluster this process is connected to, "
            f"{here!r}; got {wanted!r}. Ray connects a process to one cluster only."
        )

    def _check_room(self, resources: Resources, ranks: int, replicas: int) -> None:
        total = self.ray.cluster_resources()
        for name, amount in resources.as_bundle().items():
            have, need = total.get(name, 0.0), amount * ranks * replicas
            if have >= need:
                continue
            if _shared.local:
                raise ConfigError(
                    f"replica_count replicas must fit the local Ray cluster; got {need:g} {name} "
                    f"needed of {have:g}. Change RayConfig or replica_count."
                )
            log.warning(
                "the Ray cluster has %g %s and the replicas need %g; waiting for nodes",
                have, name, need,
            )  # fmt: skip


def _amounts(found: Mapping[str, float], names: Sequence[str]) -> str:
    """Return amounts in words: ``2 CPU and 1 GPU``."""
    return " and ".join(f"{found.get(name, 0.0):g} {name}" for name in names) or "nothing"
