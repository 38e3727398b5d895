"""Ports for servers that are told theirs, or come back to it: none that the system gives out.

A port that the system chose (bind to 0) and that is free again can be given to the next connection
of anybody before its server listens, or while it is away. These lie below those, and each process
of a test run takes them from a place of its own.
"""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

FIRST = 11_000  # above 10080, which browsers refuse
SYSTEM = Path("/proc/sys/net/ipv4/ip_local_port_range")
_STRIDE = 4099  # between processes with neighbouring ids; a whole run takes some hundred ports


def _end() -> int:
    """Return the first port that the system gives out by itself."""
    try:
        return int(SYSTEM.read_text().split()[0])
    except (OSError, ValueError):
        return 32_768


_tried = itertools.count(os.getpid() * _STRIDE)


def free_ports(count: int) -> list[int]:
    """Return so many free ports of loopback, one after the other; none is returned twice soon.

    Raises: OSError when there are none.
    """
    room = max(_end() - FIRST, 1000)  # few where the system gives out nearly all of them
    found: list[int] = []
    for _ in range(room):
        port = FIRST + next(_tried) % room
        if not _free(port) or (found and port != found[-1] + 1):
            found = []
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} free ports in a row must be left from {FIRST} on")


def _free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
