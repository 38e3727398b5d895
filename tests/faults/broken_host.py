"""``phyai-gateway`` on a machine with a fault: a clock that jumps, or a disk that is full.

    python -m tests.faults.broken_host clock|disk FLAG_FILE [arguments of phyai-gateway]

clock: while the flag file exists the wall clock jumps by years at every look. Not for grpc's own
code, which reads it as a pair, in Python and in C: a jump between the two is not one that happens.
disk: while the flag file exists nothing can be written to a file.
"""

from __future__ import annotations

import errno
import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from phyai_gateway.cli import main

YEAR_S = 365 * 24 * 3600.0


def break_clock(flag: Path) -> None:
    """Make the wall clock jump; what measures durations stays as it is."""
    real, real_ns = time.time, time.time_ns
    jumps = itertools.cycle((0.0, -20 * YEAR_S, 10 * YEAR_S, 3600.0, -3600.0))

    def broken() -> float:
        return real() + (next(jumps) if flag.exists() else 0.0)

    def broken_ns() -> int:
        return real_ns() + int((next(jumps) if flag.exists() else 0.0) * 1e9)

    import grpc.aio
    from grpc._cython import cygrpc

    assert grpc.aio
    own = SimpleNamespace(**vars(time))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "grpc" and getattr(module, "time", None) is time:
            module.time = own  # type: ignore[attr-defined]
    assert cygrpc.time is own
    time.time, time.time_ns = broken, broken_ns


def fill_disk(flag: Path) -> None:
    """Make what writes files fail as a full disk does; pipes and sockets are no files."""

    def failing(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            if flag.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args, **kwargs)

        return called

    os.fsync = failing(os.fsync)
    os.replace = failing(os.replace)


if __name__ == "__main__":
    {"clock": break_clock, "disk": fill_disk}[sys.argv[1]](Path(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
