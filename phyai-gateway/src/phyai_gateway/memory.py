"""How the allocator treats the messages of a process that passes them on."""

from __future__ import annotations

import ctypes

MIB = 1 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD
_ARENA_MAX, _ARENAS = -8, 2
_LARGEST = 4 * MIB  # of a message whose memory is kept; larger ones are rare
_KEPT = 32 * MIB


def keep_freed_memory(kept_bytes: int = _KEPT) -> bool:
    """Let the allocator keep freed blocks for the next messages; returns whether it could.

    As it comes, glibc gives a message's pages back to the system when the message is freed, and
    the next one faults each of them in again: a third of the time that a message takes here. And
    each of gRPC's threads gets an arena of its own, which the loop's thread empties: the process
    would grow by a third over its first minutes of load.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another system, or another C library
        return False
    mallopt(_ARENA_MAX, _ARENAS)
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST) and mallopt(_TRIM_THRESHOLD, kept_bytes))
