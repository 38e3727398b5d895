"""Lifeline: processes of a pool end when the engine's process is gone, however it went.

A pipe that nobody writes to. The engine's process holds the only writing end; when that is closed,
the kernel kills every process that tied itself to the reading end, also one whose step holds the
interpreter lock or hangs in a driver.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal

_SET_SIGNAL = 10  # F_SETSIG of Linux; the fcntl module does not name it


class Lifeline:
    """Both ends, in the engine's process. ``reader`` is passed on; ``cut`` ends whoever has it."""

    def __init__(self) -> None:
        self.reader, self._writer = os.pipe()

    def cut(self) -> None:
        """Kill every process that is tied to it. Idempotent."""
        for end in (self._writer, self.reader):
            if end >= 0:
                os.close(end)
        self.reader = self._writer = -1


def tie(reader: int) -> int:
    """Have the kernel kill this process when the other end is closed; return what keeps it so.

    Every process needs its own: a fork ties itself anew, to the reader it inherited.
    """
    own = os.open(f"/proc/self/fd/{reader}", os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _SET_SIGNAL, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    watch = select.poll()
    watch.register(own, select.POLLIN)
    if watch.poll(0):  # cut before it was tied
        os._exit(0)
    return own
