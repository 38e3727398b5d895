"""One process that serves one engine: load, listen, drain on a signal, close."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from phyai.errors import ConfigError
from phyai_gateway.messages import Fault
from phyai_gateway.metrics import Metrics
from phyai_gateway.protocols.base import Limits, Listener, ListenerOptions
from phyai_gateway.server.config import ServerConfig
from phyai_gateway.server.listening import (
    http_address,
    risks,
    tls_files,
    token_store,
    wanted_listeners,
)
from phyai_gateway.server.local import LocalRouter
from phyai_gateway.server.operations import OperationsListener
from phyai_gateway.server.registering import Registrar, announcement

if TYPE_CHECKING:
    from phyai_gateway.server.engine_host import EngineHost

log = logging.getLogger("phyai.server")

CLOSE_WAIT_S = 30.0  # for the engine's last request, which cannot be interrupted
THREAD = "phyai-load"
Loader = Callable[[ServerConfig], "EngineHost"]


class ModelServer:
    """Life cycle of a model server. ``load`` blocks and runs on a thread of its own.

    ports: protocol -> bound port, ``http`` for health and metrics; filled as they open.
    """

    def __init__(self, config: ServerConfig, load: Loader) -> None:
        self.config, self._load = config, load
        self.host: EngineHost | None = None
        self.ports: dict[str, int] = {}
        self.metrics = Metrics(_version())
        self._draining = False
        self._listeners: list[Listener] = []
        self._operations: OperationsListener | None = None
        # Everything that can be wrong with the file is found before any weights are read.
        self._wanted = wanted_listeners(config.server)
        self._tls, self._tokens = tls_files(config.server), token_store(config.server)
        self._http = http_address(config.server)
        self._announcement = announcement(config.server)
        self.registrar: Registrar | None = None

    def not_ready(self) -> str | None:
        """Return why the server takes no requests, None when it does."""
        if self._draining:
            return "draining"
        if self.host is None or len(self._listeners) < len(self._wanted):
            return "loading"
        return self.host.not_ready()

    async def start(self) -> None:
        """Open the health port, load the engine, open the other ports.

        Raises: ConfigError for a port that cannot be bound; what loading raises.
        """
        for line in risks(self.config.server, self._wanted):
            log.warning("%s", line)
        if self._http is not None:
            host, port = self._http
            self._operations = OperationsListener(
                self._options(host, port, {}), self.metrics, self.not_ready
            )
            self.ports["http"] = await _bound(self._operations, f"{host}:{port}")
        self.host = await _on_thread(lambda: self._load(self.config))
        self.host.open()
        router = LocalRouter(self.host, self.metrics)
        for wanted in self._wanted:
            options = self._options(wanted.host, wanted.port, dict(wanted.options))
            try:
                listener: Listener = wanted.listener(router, options)
            except Fault as fault:
                raise ConfigError(f"server.listen.{wanted.protocol}: {fault.message}") from fault
            where = f"{wanted.host}:{wanted.port}"
            self.ports[wanted.protocol] = await _bound(listener, where)
            self._listeners.append(listener)
        if self._operations is not None:
            self._operations.local = router
        if self._announcement is not None and not self._draining:
            self.registrar = Registrar(self._announcement, self.ports["native"])
            self.registrar.start()

    async def drain(self, grace_s: float) -> bool:
        """Refuse new requests and wait for accepted ones; return whether all were answered."""
        self._draining = True
        await self._fall_silent()
        waits = [asyncio.create_task(listener.drain()) for listener in self._listeners]
        if self.host is not None and self._listeners:
            waits.append(asyncio.create_task(self.host.dispatcher.drain()))
        if not waits:
            return True
        done, late = await asyncio.wait(waits, timeout=grace_s)
        for task in late:
            task.cancel()
        for task in done:
            if task.exception() is not None:
                log.error("draining failed", exc_info=task.exception())
        return not late

    async def stop(self) -> None:
        """Close ports and engine; may be called twice and after a failed start."""
        self._draining = True
        await self._fall_silent()
        listeners, self._listeners = self._listeners, []
        await asyncio.gather(*(listener.stop() for listener in listeners), return_exceptions=True)
        if self.host is not None:
            host, self.host = self.host, None
            try:
                async with asyncio.timeout(CLOSE_WAIT_S):
                    await _on_thread(host.close)
            except TimeoutError:
                log.error("engine did not close within %.0f s; left as it is", CLOSE_WAIT_S)
        operations, self._operations = self._operations, None
        if operations is not None:
            await operations.stop()

    async def _fall_silent(self) -> None:
        registrar, self.registrar = self.registrar, None
        if registrar is not None:
            await registrar.stop()

    def _options(self, host: str, port: int, options: dict[str, str]) -> ListenerOptions:
        server = self.config.server
        return ListenerOptions(
            host=host,
            port=port,
            tls=self._tls,
            tokens=self._tokens,
            limits=Limits(max_message_bytes=server.max_message_bytes),
            default_model=server.model_name,
            options=options,
            observer=self.metrics,
        )


async def serve(server: ModelServer, *, announce: Callable[[str], None]) -> int:
    """Run a server until SIGTERM or SIGINT and return the exit code.

    The first signal drains within ``grace_seconds``, a second one ends at once.
    """
    loop, signals = asyncio.get_running_loop(), 0
    first, second = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        (first if signals == 1 else second).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        starting = asyncio.create_task(server.start())
        if not await _before(starting, first):
            announce("Stopped while loading.")
            return 0
        announce(_summary(server))
        await first.wait()
        grace = server.config.server.grace_seconds
        announce(f"Stopping: accepted requests have {grace:g} s.")
        draining = asyncio.create_task(server.drain(grace))
        if not await _before(draining, second):
            announce("Stopped at once.")
            return 1
        if not draining.result():
            announce("Some requests were not answered in time.")
            return 1
        announce("Stopped.")
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        stopping = asyncio.create_task(server.stop())
        if signals < 2 and server.host is not None:
            await stopping
        else:
            await asyncio.wait({stopping}, timeout=1.0)


async def _before(task: asyncio.Task[Any], event: asyncio.Event) -> bool:
    """Return whether the task ends before the event; its error comes out, else it's cancelled."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for one in (waiting, task):
            if not one.done():
                one.cancel()
                with suppress(asyncio.CancelledError):
                    await one


def _summary(server: ModelServer) -> str:
    name = server.config.server.model_name
    ports = ", ".join(f"{protocol} {port}" for protocol, port in server.ports.items())
    return f"Model {name!r} is ready on {server.config.server.host}: {ports}."


async def _bound(listener: Any, where: str) -> int:
    try:
        port: int = await listener.start()
    except OSError as error:
        raise ConfigError(
            f"address {where} must be free; it cannot be bound: {error}. Choose another port."
        ) from error
    return port


async def _on_thread(work: Callable[[], Any]) -> Any:
    """Return what a blocking call returns; its thread doesn't keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop has closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=THREAD, daemon=True).start()
    return await future


def _version() -> str:
    try:
        return version("phyai-gateway")
    except PackageNotFoundError:  # a source tree that was never installed
        return "unknown"


def print_line(text: str) -> None:
    """Say a line on stderr at once; stdout is nobody's here."""
    print(text, file=sys.stderr, flush=True)
