"""Processes of a pool as the engine's process sees them: pid, exit, last words on stderr."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

_READS = 4
"""Pieces of a worker's stderr that are passed on before others get their turn."""
TAIL_BYTES = 8192
"""How much of a worker's stderr is kept for the text of an error."""
_SHOWN_LINES = 40


class ProcessHandle:
    """A process by pid, also one that is no child of ours; never hits another one's pid.

    status: as ``os.waitpid`` gives it, from whoever can wait for it; None = not known (yet).
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:  # gone already
            self._fd = -1

    def ended(self) -> bool:
        """Return whether it has ended."""
        if self._fd < 0 or self.status is not None:
            return True
        watch = select.poll()
        watch.register(self._fd, select.POLLIN)
        return bool(watch.poll(0))

    def kill(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it has not after so long."""
        if self._fd < 0:
            return True
        watch = select.poll()
        watch.register(self._fd, select.POLLIN)
        return bool(watch.poll(int(1000 * timeout_s)))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def ending(self) -> str:
        """Return how it ended: ``was killed by SIGKILL``, ``exited with code 3``."""
        return how_it_ended(self.status)


def how_it_ended(status: int | None) -> str:
    """Return an exit status in words.

    >>> how_it_ended(9), how_it_ended(3 << 8), how_it_ended(None)
    ('was killed by SIGKILL', 'exited with code 3', 'is gone')
    """
    if status is None:
        return "is gone"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


class StderrTail:
    """The reading end of a worker's stderr: passes it on to ours, and keeps its last words."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._kept = b""

    def fileno(self) -> int:
        return self._reader

    def passed_on(self) -> None:
        """Close our copy of the writing end: the worker has its own."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def feed(self) -> bool:
        """Read what is there, or much of it; False at the end."""
        for _ in range(_READS if self._reader >= 0 else 0):
            try:
                data = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._kept = (self._kept + data)[-TAIL_BYTES:]
            with contextlib.suppress(Exception):  # ours may be closed, or no file at all
                sys.stderr.write(data.decode("utf-8", "replace"))
                sys.stderr.flush()
        return self._reader >= 0

    def text(self) -> str:
        """Return its last lines as the end of a message; nothing when it said nothing."""
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        # Of a crash the interpreter lists all extension modules: names that say nothing.
        lines = [s for s in lines if s and not s.startswith("Extension modules:")][-_SHOWN_LINES:]
        return "" if not lines else "\nIts last words on stderr:\n  " + "\n  ".join(lines)

    def close(self) -> None:
        self.passed_on()
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
