"""A gRPC port for one protocol: caps, tokens, faults, byte budget, drain; subclasses say the calls.

Messages are read as bytes here, so that a client that sends one for ever is dropped in time, and
parts are counted before anything is parsed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1.health_pb2 import HealthCheckRequest

from phyai_gateway import reflection, trace
from phyai_gateway.messages import Call, Fault, bare
from phyai_gateway.proto.status import CODES, details_of, metadata_of
from phyai_gateway.protocols.arrivals import Arrivals
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.native_health import SERVICE as HEALTH
from phyai_gateway.protocols.native_health import Health
from phyai_gateway.tokens import Scope

log = logging.getLogger(__name__)
MAX_METADATA_BYTES = 16 * 1024
MAX_STREAMS = 1024  # of one connection: a gateway sends all its robots over one
MAX_SMALL_BYTES = 64 * 1024  # of a message without payload
BUDGET_MESSAGES = 16  # of the largest size, in flight at once
BUSY_RETRY_S = 0.1
FLUSH_S = 2.0
QUIET_S, MOST_QUIET_S = 0.2, 1.0

Context = Any  # grpc.aio.ServicerContext, which isn't generic at run time
Services = Mapping[str, Mapping[str, Any]]
"""Service name -> method name -> handler."""


class GrpcListener:
    """Serves ``services()`` and grpc.health.v1.  largest_bytes: of a message, below the limits."""

    name: ClassVar[str] = "grpc"
    default_port: ClassVar[int] = 0
    takes_tokens: ClassVar[bool] = True
    takes_tls: ClassVar[bool] = True
    largest_bytes: ClassVar[int | None] = None

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        self.router, self.options = router, options
        self.health = Health(router)
        self._arrivals = Arrivals(options.limits.receive_timeout_s)
        self._server: Any = None
        self._refused = -1e9  # when a request was last refused because of a drain
        self._in_flight = 0
        self._bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def services(self) -> Services:
        raise NotImplementedError

    # ------------------------------------------------------------ life cycle

    async def start(self) -> int:
        options, limit = self.options, self.options.limits.max_message_bytes
        limit = min(limit, self.largest_bytes or limit)
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.max_metadata_size", MAX_METADATA_BYTES),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.so_reuseport", int(options.reuse_port)),
                ("grpc.server_handshake_timeout_ms", 10_000),  # of who connects and says nothing
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC waits a minute without it
                ("grpc.keepalive_permit_without_calls", 1),  # a robot may vanish between two calls
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            )
        )
        services = {**self.services(), HEALTH: self._health()}
        handlers = [grpc.method_handlers_generic_handler(n, dict(m)) for n, m in services.items()]
        server.add_generic_rpc_handlers(handlers)
        if options.reflection:
            reflection.add(server, services)
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"{host}:{options.port}"
        try:
            if options.tls is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, options.tls.grpc_credentials())
        except RuntimeError as error:
            raise OSError(f"address {address} cannot be bound") from error
        if not port:
            raise OSError(f"address {address} cannot be bound")
        await server.start()
        self._server = server
        return int(port)

    async def drain(self) -> None:
        """Say NOT_SERVING, refuse new requests, return when those accepted are answered."""
        self.health.draining = True
        self._refused = time.monotonic()
        await self._empty.wait()

    async def stop(self) -> None:
        drained = self.health.draining and self._empty.is_set()
        self.health.draining = self.health.closing = True
        server, self._server = self._server, None
        if server is None:
            return
        if drained:
            await self._quiet()
        # The last answers may still be on their way.
        await server.stop(FLUSH_S if drained else None)

    async def _quiet(self) -> None:
        """Go on refusing until nobody asks: gRPC resets what reaches a server that shuts down."""
        until = time.monotonic() + MOST_QUIET_S
        while (now := time.monotonic()) < min(self._refused + QUIET_S, until):
            await asyncio.sleep(min(self._refused + QUIET_S, until) - now)

    def _health(self) -> Mapping[str, Any]:
        async def watch(_: Any, context: Context) -> None:
            async def work() -> None:
                request = await self._small_message(HealthCheckRequest, context)
                await self.health.watch(request, context)

            await self.guarded(work(), context)

        return {
            "Check": self.small(HealthCheckRequest, self.health.check),
            "Watch": grpc.stream_stream_rpc_method_handler(watch),
        }

    # ------------------------------------------------------------ for the calls

    def headers(self, context: Context) -> dict[str, str]:
        """Return the text metadata of a call, and keep its trace context; the last of a key."""
        found = {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}
        trace.note(found.get)
        return found

    def principal(self, headers: Mapping[str, str], scope: Scope = "infer") -> str | None:
        """Return who asks; None where no tokens are used. Raises Fault."""
        tokens = self.options.tokens
        return None if tokens is None else tokens.check_header(headers.get("authorization"), scope)

    def call_of(self, context: Context, headers: Mapping[str, str], principal: str | None) -> Call:
        """Return the circumstances of a unary call."""
        left = context.time_remaining()
        return Call(
            self.name,
            deadline=None if left is None else time.monotonic() + left,
            robot=headers.get("x-robot-id") or None,
            principal=principal,
            peer=context.peer(),
        )

    def check_open(self) -> None:
        """Raise Fault when the listener takes nothing new."""
        if self.health.draining:
            self._refused = time.monotonic()
            raise Fault("unavailable", "server is stopping. Ask another one.", retry_after=1.0)

    async def receive(self, context: Context) -> bytes:
        """Return the one message of a call.

        Raises: Fault when draining, and when it does not arrive in time.
        """
        self.check_open()
        payload = await self._arrived(context)
        self.check_open()
        self.options.observer.transferred("in", len(payload))
        return payload

    async def _arrived(self, context: Context) -> bytes:
        try:
            payload = await self._arrivals.wait(context.read())
        except TimeoutError:
            limit_s = self.options.limits.receive_timeout_s
            raise Fault(
                "deadline_exceeded", f"request must arrive within {limit_s:g} s; it did not."
            ) from None
        if payload is grpc.aio.EOF:
            raise Fault("invalid_argument", "call must send one message; got none.")
        found: bytes = payload
        return found

    def counted(self, num_bytes: int) -> _Counted:
        """Return what holds an accepted request and its bytes until it is answered.

        Raises: Fault on entering, over the byte budget.
        """
        return _Counted(self, num_bytes)

    def unary(self, call: Callable[[Context], Awaitable[bytes]]) -> Any:
        """Return the handler of a call that gets one message, read by ``receive``."""

        async def handle(_: Any, context: Context) -> bytes:
            answer: bytes = await self.guarded(call(context), context)
            return answer

        return grpc.stream_unary_rpc_method_handler(handle)

    def small(self, kind: Any, answer: Callable[[Any], Any], scope: Scope | None = None) -> Any:
        """Return the handler of a call with a small message, also while draining.

        answer: takes the parsed message, returns one, or an awaitable of it.  scope: that tokens
        must have; None = none is asked for.
        """

        async def call(context: Context) -> bytes:
            if scope is not None:
                self.principal(self.headers(context), scope)
            found = answer(await self._small_message(kind, context))
            if inspect.isawaitable(found):
                found = await found
            return bytes(found.SerializeToString())

        return self.unary(call)

    async def _small_message(self, kind: Any, context: Context) -> Any:
        payload = await self._arrived(context)
        try:
            if len(payload) <= MAX_SMALL_BYTES:
                return kind.FromString(payload)
        except DecodeError:
            pass
        raise Fault(
            "invalid_argument",
            f"message must be a {kind.DESCRIPTOR.name} of at most {MAX_SMALL_BYTES} bytes; it is "
            "not.",
        )

    async def guarded(self, work: Awaitable[Any], context: Context) -> Any:
        """Return what the work gives; its faults become gRPC's, of others a client learns only
        that they happened."""
        try:
            return await work
        except Fault as error:
            fault = bare(error)
        except Exception:
            log.exception("a call of the %s listener failed", self.name)
            fault = Fault("internal", "server failed; its log says why.", started=True)
        return await context.abort(CODES[fault.status], details_of(fault), metadata_of(fault))


class _Counted:
    """One accepted request and its bytes, until it is answered."""

    def __init__(self, listener: GrpcListener, num_bytes: int) -> None:
        self._listener, self._num_bytes = listener, num_bytes

    def __enter__(self) -> None:
        one = self._listener
        if one._bytes + self._num_bytes > BUDGET_MESSAGES * one.options.limits.max_message_bytes:
            raise Fault(
                "resource_exhausted",
                "requests in flight must fit the server's byte budget; they do not. Try later.",
                retry_after=BUSY_RETRY_S,
            )
        one._in_flight += 1
        one._bytes += self._num_bytes
        one._empty.clear()

    def __exit__(self, *exc: object) -> None:
        one = self._listener
        one._in_flight -= 1
        one._bytes -= self._num_bytes
        if not one._in_flight:
            one._empty.set()
