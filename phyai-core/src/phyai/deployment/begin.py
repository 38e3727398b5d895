"""Where a fresh process of a pool begins: tied to the engine's process before anything large."""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import socket
from contextlib import suppress
from multiprocessing import process, spawn
from multiprocessing.connection import Connection
from typing import Any

from phyai.deployment.lifeline import tie


def main(role: str, lifeline: int, channel: int, setting: int) -> None:
    """Run as a loader or a worker, told by the engine's process through ``setting``."""
    tie(lifeline)
    obey_the_engine()
    show_crashes()
    with Connection(setting) as connection:
        current: Any = process.current_process()
        # The main module is imported for its classes: multiprocessing refuses to start processes
        # meanwhile, with a text that says what is missing there.
        current._inheriting = True
        try:
            spawn.prepare(connection.recv())
            launch, order = connection.recv()
        finally:
            del current._inheriting
    sock = socket.socket(fileno=channel)
    if role == "loader":
        from phyai.deployment.loader import load_and_fork

        load_and_fork(sock, launch, lifeline)
    elif role == "rank":
        from phyai.deployment.rank_worker import load_and_follow

        load_and_follow(sock, launch, order)
    else:
        from phyai.deployment.worker import load_and_work

        load_and_work(sock, launch, order)


def use_stderr(descriptor: int) -> None:
    """Write stderr into another pipe from now on, also that of C code and of a crash."""
    os.dup2(descriptor, 2)
    os.close(descriptor)


def show_crashes() -> None:
    """Have a crash say where it was, on stderr."""
    with suppress(io.UnsupportedOperation, RuntimeError, ValueError):
        faulthandler.enable(all_threads=False)


def obey_the_engine() -> None:
    """Leave Ctrl-C and SIGTERM, which reach the whole group, to the engine's process.

    It drains first, and ends its workers then; a handler, because SIG_IGN would be inherited by
    programs that an adapter starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignored)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _ignored(number: int, frame: object) -> None:
    return None
