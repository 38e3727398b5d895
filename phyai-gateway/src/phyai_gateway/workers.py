"""``--workers N``: several gateway processes behind the same ports, and the parent that keeps them.

Workers share nothing: each one knows the backends from the command line or ``--backends-file`` and
counts what it does itself.  So what needs one memory stays out: management over HTTP, ``--state``,
and protocols whose clients are known by their connection, which worker 0 serves alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from phyai_gateway.listeners import ConfigError, format_endpoint
from phyai_gateway.share import Share

log = logging.getLogger("phyai_gateway")
MOST = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
STABLE_S = 60.0  # a worker that lived as long begins with the first pause again
WRONG_SETTINGS = 2  # exit status of the command
END_S = 5.0


def share_of(args: argparse.Namespace) -> Share:
    """Return it, checked against the other settings; raises ConfigError."""
    if not 1 <= args.workers <= MOST:
        raise ConfigError(f"--workers must be 1 to {MOST}; got {args.workers}.")
    share = Share(args.worker or 0, args.workers)
    if not 0 <= share.index < share.count:
        raise ConfigError("--worker is for processes that --workers starts.")
    if not share.many:
        return share
    if args.state is not None:
        raise ConfigError(
            "--state excludes --workers: registrations belong to one process. Use --backends-file, "
            "which all of them follow."
        )
    if not 0 < args.http_port <= 65536 - share.count:
        raise ConfigError(
            "--http-port must be a fixed port with --workers; each worker has the next one. Got "
            f"{args.http_port}."
        )
    return share


def check_free(addresses: Iterable[tuple[str, int]]) -> None:
    """Raise ConfigError for a port that is fixed nowhere or taken: shared ones would not tell."""
    for host, port in addresses:
        where = format_endpoint(host, port)
        if port == 0:
            raise ConfigError(f"{where} must be a fixed port with --workers. Choose one.")
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
                tried.listen()
            except OSError as error:
                raise ConfigError(f"cannot listen on {where}: {error.strerror}.") from None


@dataclass(slots=True)
class _Worker:
    """One process, started again when it dies. pause_s: before the next start.  starts: so far."""

    index: int
    pause_s: float
    process: asyncio.subprocess.Process | None = None
    code: int = 0
    starts: int = 0


class Supervisor:
    """Starts the workers, passes signals on, and starts again who dies.

    command: of one worker, to which ``--worker K`` is added.
    """

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = tuple(command)
        self.workers = [_Worker(index, FIRST_PAUSE_S) for index in range(count)]
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Return the exit status when all have ended: the worst of theirs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self.pass_on, number)
        try:
            await asyncio.gather(*(self._keep(worker) for worker in self.workers))
        finally:
            for worker in self.workers:
                await self._end(worker)
        return max(worker.code for worker in self.workers)

    def pass_on(self, number: int) -> None:
        """Send a signal to every worker; one that ends them keeps the dead from coming back."""
        if number != signal.SIGHUP:
            self._stopping.set()
        for worker in self.workers:
            if worker.process is not None and worker.process.returncode is None:
                with suppress(ProcessLookupError):
                    worker.process.send_signal(number)

    async def _keep(self, worker: _Worker) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._live(worker)
            worker.code = code if code >= 0 else 1
            if self._stopping.is_set():
                return
            if code == WRONG_SETTINGS and worker.starts == 1:
                # It would end the same way each time. Later ones have only met a moment when the
                # backends file is half written, or a port still taken: the others go on.
                self.pass_on(signal.SIGTERM)
                return
            if time.monotonic() - began >= STABLE_S:
                worker.pause_s = FIRST_PAUSE_S
            log.error("worker %d ended with %d; another one starts", worker.index, code)
            with suppress(TimeoutError):
                async with asyncio.timeout(worker.pause_s):
                    await self._stopping.wait()
            worker.pause_s = min(2 * worker.pause_s, LONGEST_PAUSE_S)

    async def _live(self, worker: _Worker) -> int:
        worker.starts += 1
        # Its input is a pipe that nothing is written to: it ends with this process, however.
        try:
            process = worker.process = await asyncio.create_subprocess_exec(
                *(*self._command, "--worker", str(worker.index)),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C comes once, through here
            )
        except OSError as error:  # no process or file handle is free at the moment
            log.error("worker %d cannot be started: %s", worker.index, error.strerror)
            return 1
        if self._stopping.is_set():
            process.terminate()
        return await process.wait()

    async def _end(self, worker: _Worker) -> None:
        process = worker.process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def command(argv: Sequence[str]) -> list[str]:
    """Return what starts this gateway again with the arguments."""
    return [sys.executable, "-m", "phyai_gateway.cli", *argv]


def follow_parent(ended: Callable[[], None]) -> None:
    """Call back when the parent's end of the standard input closes."""
    loop, handle = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(handle, 4096):
            loop.remove_reader(handle)
            ended()

    loop.add_reader(handle, read)
