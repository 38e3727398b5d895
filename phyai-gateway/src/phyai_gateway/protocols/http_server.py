"""An HTTP port: uvicorn with caps on connections, header time, body size and body time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol

from phyai_gateway.protocols.base import ListenerOptions, Router

log = logging.getLogger(__name__)
MAX_HEADER_BYTES = 16 * 1024
KEEP_ALIVE_S = 30
STOP_WAIT_S = 2.0
REST_WAIT_S = 2.0  # for the rest of a body that was answered already


class HttpListener:
    """A port that serves ``routes()``; subclasses say which."""

    name: ClassVar[str] = "http"
    default_port: ClassVar[int] = 30000
    takes_tokens: ClassVar[bool] = True
    takes_tls: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        self.router, self.options = router, options
        self.draining = False
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None

    def routes(self) -> Sequence[BaseRoute]:
        raise NotImplementedError

    async def start(self) -> int:
        self._socket = bind(self.options.host, self.options.port, self.options.reuse_port)
        port: int = self._socket.getsockname()[1]
        tls = self.options.tls
        config = uvicorn.Config(
            Starlette(routes=list(self.routes())),
            http=_protocol(self.options),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ssl_context_factory=None if tls is None else lambda *_: tls.server_context(),
        )
        try:
            config.load()
        except BaseException:
            self._socket.close()
            raise
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve([self._socket]), name=f"http-{port}")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError("the HTTP server ended while starting")
            await asyncio.sleep(0.005)
        return port

    def reload_tls(self) -> None:
        """Use the certificate files as they are now for new connections."""
        if self.options.tls is not None and self._server is not None:
            context = self._server.config.ssl
            if context is not None:
                self.options.tls.reload(context)

    async def drain(self) -> None:
        self.draining = True
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        self.draining = True
        server, task, self._server, self._task = self._server, self._task, None, None
        if server is None or task is None:
            return
        server.should_exit = server.force_exit = True
        for listening in getattr(server, "servers", ()):
            listening.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for running in [*server.server_state.tasks, task]:
            running.cancel()
        await asyncio.wait({task}, timeout=STOP_WAIT_S)
        if self._socket is not None:
            self._socket.close()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process: it has other listeners to drain."""
        yield


def bind(host: str, port: int, reuse_port: bool = False) -> socket.socket:
    """Return a socket bound to exactly the address; raises OSError.

    reuse_port: other processes may bind it, too.
    """
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind(address)
        found.setblocking(False)
    except BaseException:
        found.close()
        raise
    return found


def _protocol(options: ListenerOptions) -> type[H11Protocol]:
    """Return uvicorn's protocol with a cap on connections and on the time that headers take.

    uvicorn starts its only timer after a response, so a client that sends one byte a minute would
    hold a connection for ever.
    """
    limits = options.limits

    class Guarded(H11Protocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._headers_due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            options.observer.sessions("http", len(self.connections))
            if len(self.connections) > limits.max_connections:
                transport.abort()
                return
            self._expect_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_came()
            super().connection_lost(exc)
            options.observer.sessions("http", len(self.connections))

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                self._expect_headers()
            elif self.conn.their_state is not h11.IDLE:
                self._headers_came()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                # Each byte that still comes would put off the keep-alive timer, without an end.
                self.loop.call_later(REST_WAIT_S, self._close_unfinished, self.cycle)

        def _close_unfinished(self, cycle: object) -> None:
            if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
                self.transport.close()

        def _expect_headers(self) -> None:
            if self._headers_due is None:
                self._headers_due = self.loop.call_later(
                    limits.receive_timeout_s, self.transport.abort
                )

        def _headers_came(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

    return Guarded
