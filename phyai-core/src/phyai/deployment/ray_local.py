"""A Ray cluster of this machine alone: started on the loopback address, ended without leftovers."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phyai.deployment.processes import ProcessHandle

log = logging.getLogger("phyai")

STORE_BYTES = 256 * 2**20
END_S = 5.0
ATTEMPTS = 3
"""Ray gives a node 30 s to start, which a busy machine may miss."""
_ON_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing about a robot's computer leaves it
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",  # idle workers would take memory for nothing
    # When the engine's process is killed, so is the head; agents would look for it for a minute.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def start(ray: Any, num_cpus: int, store_bytes: int | None, **options: Any) -> None:
    """Start the cluster and connect this process to it. Raises: what Ray does."""
    options |= {
        "address": "local",
        "num_cpus": num_cpus,
        "object_store_memory": store_bytes or STORE_BYTES,
        "include_dashboard": False,
    }
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with _loopback(), _variables(_VARIABLES):
                ray.init(**options)
            break
        except Exception as error:
            if "timed out" not in str(error) or attempt == ATTEMPTS:
                raise
            log.warning("the local Ray cluster did not start in time; trying again: %s", error)
            stop(ray)
    address = ray.get_runtime_context().gcs_address
    if not address.startswith(("127.", "[::1]")):
        log.warning("the local Ray cluster listens on the network, at %s", address)


def stop(ray: Any) -> None:
    """End the cluster; return when its processes are gone."""
    family = _family(ray)
    ray.shutdown()
    until = time.monotonic() + END_S
    for process in family:
        if not process.wait(max(0.0, until - time.monotonic())):
            process.kill()
            process.wait(1.0)
        process.close()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Have Ray use the loopback address, as it does where it supports no clusters of hosts.

    ``ray.init`` replaces a given 127.0.0.1 by the machine's own address, and its services would
    listen to the network. Where a later Ray does not know the switch, ``start`` says so.
    """
    constants = importlib.import_module("ray._private.ray_constants")
    before = getattr(constants, "ENABLE_RAY_CLUSTER", None)
    constants.__dict__["ENABLE_RAY_CLUSTER"] = False
    try:
        with _variables({_ON_LOOPBACK: "0"}):
            yield
    finally:
        constants.__dict__["ENABLE_RAY_CLUSTER"] = before


@contextlib.contextmanager
def _variables(variables: dict[str, str]) -> Iterator[None]:
    """Set variables that the cluster's processes inherit, unless the user has set them."""
    given = dict(os.environ)
    new = {name: value for name, value in variables.items() if name not in given}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            with contextlib.suppress(KeyError):
                del os.environ[name]


def _family(ray: Any) -> list[ProcessHandle]:
    """Return the processes that Ray has started in this one's name, and theirs.

    Its agents outlive a cluster that ends soon after it began.
    """
    package = os.fsencode(Path(ray.__file__).parent)
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = Path("/proc", entry, "stat").read_text(encoding="utf-8", errors="replace")
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    waiting = []
    for pid in children.get(os.getpid(), []):
        with contextlib.suppress(OSError):
            if package in Path(f"/proc/{pid}/cmdline").read_bytes():
                waiting.append(pid)
    found = []
    while waiting:
        pid = waiting.pop()
        found.append(ProcessHandle(pid))
        waiting += children.get(pid, [])
    return found
