"""LeRobot's asynchronous inference service, for unmodified robot clients.

Nothing a client sends is unpickled: ``decode.pickle_reader`` reads it without executing anything.
These clients can't present a token and don't speak TLS, hence a listener of their own.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import grpc
import grpc.aio

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import MIB, ByteBudget, DecodeError
from phyai_gateway.decode.pickle_writer import write_flat
from phyai_gateway.messages import Call, Fault, bare
from phyai_gateway.proto.status import CODES, details_of
from phyai_gateway.protocols import lerobot_objects as objects
from phyai_gateway.protocols import lerobot_request as requests
from phyai_gateway.protocols import lerobot_wire as wire
from phyai_gateway.protocols.arrivals import Arrivals
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.lerobot_session import Pending, Session, Sessions
from phyai_gateway.protocols.observation import chunk, ends_session, names
from phyai_gateway.protocols.options import Settings

_LOG = logging.getLogger(__name__)
_SERVICE = "transport.AsyncInference"
_CLIENT_LIMIT = 4 * MIB  # what a client takes in one message
_POLL_S = 2.0
_HOLD_S = 0.25
"""A client that gets an error at once calls again at once, 1,400 times a second."""
_BYTES_HELD = 1 << 30
_MAX_ERROR_TEXT = 1000
Context = Any  # grpc.aio.ServicerContext[bytes, bytes]; the class isn't generic at run time


class LerobotListener:
    """Serves unmodified LeRobot clients.

    Options: ``fps`` and ``fps.MODEL`` (rows per second, default 30 or the model's rate),
    ``alias.NAME`` = MODEL, or ``alias`` = NAME=MODEL;... for clients that ask for another name,
    ``camera.NAME`` = CAMERA for robots whose cameras are named otherwise than the model's,
    ``similarity_atol`` (off), ``max_observation_age_s`` (1), ``max_failures`` before they become
    an error (5), ``timeout_s`` of one inference, ``session_idle_s`` (600), ``state_file`` to know
    robots again after a restart.
    """

    name: ClassVar[str] = "lerobot"
    default_port: ClassVar[int] = 8080
    takes_tokens: ClassVar[bool] = False
    takes_tls: ClassVar[bool] = False

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        settings = Settings(self.name, options.options)
        self._fps = settings.number("fps", 30.0)
        self._fps_of = {
            model: settings.number(f"fps.{model}", 30.0) for model in settings.prefixed("fps")
        }
        self._aliases = settings.prefixed("alias") | _pairs(settings.text("alias", "") or "")
        self._cameras = settings.prefixed("camera")
        self._similarity = settings.seconds("similarity_atol", None)
        self._max_age_s = settings.number("max_observation_age_s", 1.0)
        self._max_failures = settings.number("max_failures", 5.0)
        self._timeout_s = settings.seconds("timeout_s", None)
        idle_s = settings.number("session_idle_s", 600.0)
        file = settings.text("state_file")
        settings.finish()
        self._router, self._options = router, options
        most = options.limits.max_sessions
        self._sessions = Sessions(most, idle_s, Path(file) if file else None)
        self._budget = ByteBudget(max(_BYTES_HELD, options.limits.max_message_bytes))
        self._server: grpc.aio.Server | None = None
        self._draining = False
        self._arrivals = Arrivals(options.limits.receive_timeout_s)

    async def start(self) -> int:
        """Bind, and return the port; raises OSError."""
        limits = self._options.limits
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", 10_000),  # of who connects and says nothing
                ("grpc.max_receive_message_length", _CLIENT_LIMIT + MIB),
                ("grpc.max_metadata_size", 16 * 1024),
                ("grpc.max_concurrent_streams", 16),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # gRPC waits a minute without it
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ),
            maximum_concurrent_rpcs=limits.max_connections * limits.per_connection,
        )
        handlers = {
            "Ready": grpc.unary_unary_rpc_method_handler(self._guarded(self._ready)),
            "SendPolicyInstructions": grpc.unary_unary_rpc_method_handler(
                self._guarded(self._set_up)
            ),
            "SendObservations": grpc.stream_unary_rpc_method_handler(self._guarded(self._observe)),
            "GetActions": grpc.unary_unary_rpc_method_handler(self._guarded(self._get_actions)),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_SERVICE, handlers),)
        )
        host = self._options.host
        address = f"[{host}]" if ":" in host else host
        try:
            port = self._server.add_insecure_port(f"{address}:{self._options.port}")
        except RuntimeError as error:
            where = f"{address}:{self._options.port}"
            raise OSError(f"address {where} cannot be bound") from error
        await self._server.start()
        return int(port)

    async def drain(self) -> None:
        """Take no more observations, and return when every call is answered."""
        self._draining = True
        if self._server is not None:
            await self._server.stop(30.0)

    async def stop(self) -> None:
        """Close everything; may be called twice."""
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    # ------------------------------------------------------------ calls

    async def _ready(self, _: bytes, context: Context) -> bytes:
        try:
            session = self._sessions.ready(*_peer(context))
        except Fault:
            await asyncio.sleep(_HOLD_S)
            raise
        self._touch(session)
        self._options.observer.sessions(self.name, len(self._sessions))
        return wire.EMPTY

    async def _set_up(self, message: bytes, context: Context) -> bytes:
        setup = objects.read_setup(wire.read_setup(message))
        model = self._model(setup.policy)
        requests.plan(setup, self._router.contract(model), self._cameras)
        session = await self._session(context)
        _LOG.info("a robot asks for model %r; its device %r is ignored", model, setup.device[:32])
        session.setup, session.model = setup, model
        session.reset()
        self._sessions.save()
        return wire.EMPTY

    async def _observe(self, stream: AsyncIterator[bytes], context: Context) -> bytes:
        session = await self._session(context)
        session.calls += 1
        try:
            with ExitStack() as held:
                payload = await self._receive(stream, held)
                self._options.observer.transferred("in", len(payload))
                pending = self._pending(payload, session)
            self._check_room(session, len(payload))
            reason = session.offer(pending, self._similarity)
        finally:
            session.calls -= 1
            session.seen = time.monotonic()
        if reason is not None:
            self._options.observer.dropped(reason)
        return wire.EMPTY  # before any inference: the robot's control loop waits for this

    async def _get_actions(self, _: bytes, context: Context) -> bytes:
        session = await self._session(context)
        session.calls += 1
        try:
            data = await self._next_chunk(session)
            self._options.observer.transferred("out", len(data))
            return wire.write_actions(data)
        except asyncio.CancelledError:
            session.gone = True
            session.forget_mailbox()
            raise
        finally:
            session.calls -= 1
            session.seen = time.monotonic()

    # ------------------------------------------------------------ sessions

    async def _session(self, context: Context) -> Session:
        """Return the caller's session; the refusal of an unknown one is held."""
        if self._draining:
            raise Fault("unavailable", "server is going away. Call again.")
        session = self._sessions.find(*_peer(context))
        if session is None:
            await asyncio.sleep(_HOLD_S)
            raise Fault("failed_precondition", "call Ready first, and then set up a policy.")
        self._touch(session)
        return session

    def _touch(self, session: Session) -> None:
        session.gone, session.seen = False, time.monotonic()

    def _model(self, policy: str) -> str:
        """Return the model that a client's policy name means; it is a name, never a path."""
        known = self._router.models()
        model = self._aliases.get(policy, policy)
        if model not in known:
            raise Fault(
                "not_found",
                f"pretrained_name_or_path must be one of {names(known)}; got "
                f"{policy[:100]!r}. Use one of them, or start the listener with an alias.",
            )
        return model

    # ------------------------------------------------------------ observations

    async def _receive(self, stream: AsyncIterator[bytes], held: ExitStack) -> memoryview:
        chunks = wire.ChunkStream(self._options.limits.max_message_bytes)

        async def arrive() -> None:
            async for message in stream:
                held.enter_context(self._budget.hold(len(message)))
                chunks.feed(wire.read_observation(message))

        try:
            await self._arrivals.wait(arrive())
        except TimeoutError:
            raise Fault("deadline_exceeded", "observation took too long to arrive.") from None
        return chunks.finish()

    def _check_room(self, session: Session, num_bytes: int) -> None:
        """Bound what all mailboxes hold: nobody need ever call for the actions."""
        most = self._budget.limit_bytes
        if self._sessions.waiting_bytes(session) + num_bytes > most:
            raise Fault(
                "resource_exhausted",
                f"observations that wait may hold {most} bytes; they do. Call GetActions.",
            )

    def _pending(self, payload: memoryview, session: Session) -> Pending:
        setup = session.setup
        if setup is None:
            raise Fault("failed_precondition", "call SendPolicyInstructions before observations.")
        contract = self._router.contract(session.model)
        found = objects.read_observation(payload)
        made = self._plan(session, setup, contract)
        request = requests.request_of(found, setup, made, contract, uuid.uuid4().hex)
        state = tuple(objects.joint_values(found, setup)) if self._similarity else ()
        return Pending(
            request, found.timestamp_s, found.timestep, found.must_go, state, len(payload)
        )

    def _plan(
        self, session: Session, setup: objects.Setup, contract: ModelContract
    ) -> requests.Plan:
        """Return how the robot's observations become the model's, worked out once."""
        known = session.planned
        if known is None or known[0] is not setup or known[1] is not contract:
            made = requests.plan(setup, contract, self._cameras)
            known = session.planned = (setup, contract, made)
        return known[2]

    # ------------------------------------------------------------ actions

    async def _next_chunk(self, session: Session) -> bytes:
        """Return one pickled chunk, empty for none; one call of a session works, others wait."""
        end = time.monotonic() + _POLL_S
        try:
            if session.lock.locked():
                async with asyncio.timeout(_POLL_S):
                    await session.lock.acquire()
            else:
                await session.lock.acquire()
        except TimeoutError:
            return b""
        try:
            remaining = max(end - time.monotonic(), 0.0)
            dropped = self._options.observer.dropped
            pending = await session.take(remaining, self._max_age_s, dropped)
            return b"" if pending is None else await self._predict(session, pending)
        finally:
            session.lock.release()

    async def _predict(self, session: Session, pending: Pending) -> bytes:
        session.mark(pending)
        try:
            data = await self._infer(session, pending)
        except asyncio.CancelledError:
            session.unmark(pending)
            session.begin()
            raise
        except Fault as fault:
            session.unmark(pending)
            if ends_session(fault):
                session.begin()
            return await self._failed(session, pending, fault)
        except Exception:
            _LOG.exception("lerobot request %s failed", pending.request.request_id)
            session.unmark(pending)
            bug = Fault("internal", "the server failed on this request.")
            return await self._failed(session, pending, bug)
        session.failures = 0
        return data

    async def _infer(self, session: Session, pending: Pending) -> bytes:
        assert session.setup is not None
        contract, request = self._router.contract(session.model), pending.request
        if contract.stateful:
            own = {"session_id": session.id, "seq": session.seq}
            request = replace(request, options={**request.options, **own})
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        call = Call(self.name, deadline, f"lerobot:{session.id}", peer=session.host)
        reply = await self._router.infer(request, call)
        session.seq += 1
        actions = chunk(reply, contract, rows=1)
        _, horizon, width = actions.shape
        count = min(horizon, session.setup.actions_per_chunk)
        values = struct.unpack_from(f"<{count * width}f", actions.data)
        due = pending.timestamp_s, pending.timestep, self._rate(session.model, contract)
        data = write_flat(values, (count, width), *due)
        if len(data) > _CLIENT_LIMIT - 1024:
            raise Fault("data_loss", "the chunk has more bytes than LeRobot's clients take.")
        return data

    def _rate(self, model: str, contract: ModelContract) -> float:
        return self._fps_of.get(model) or contract.control_hz or self._fps

    async def _failed(self, session: Session, pending: Pending, fault: Fault) -> bytes:
        session.failures += 1
        if session.failures == 1:  # in a row: in an overload it is so with every observation
            _LOG.warning("model %r failed for a robot: %s", session.model, fault.status)
        await asyncio.sleep(_HOLD_S)
        session.put_back(pending, self._max_age_s)
        if session.failures < self._max_failures:
            return b""
        raise Fault(
            "unavailable",
            f"model {session.model!r} failed {session.failures} times in a row; the last time: "
            f"{fault.status}: {fault.message[:_MAX_ERROR_TEXT]}",
        )

    def _guarded(self, call: Callable[[Any, Context], Awaitable[bytes]]) -> Any:
        """Return the call with its faults as gRPC's; of others a client learns only that."""

        async def guarded(request: Any, context: Context) -> bytes:
            try:
                return await call(request, context)
            except Fault as error:
                fault = bare(error)
            except Exception:
                _LOG.exception("a lerobot call failed")
                await asyncio.sleep(_HOLD_S)
                fault = Fault("internal", "the server failed on this call.")
            if fault.status == "invalid_argument":
                kind = "unreadable" if isinstance(fault, DecodeError) else "invalid"
                self._options.observer.decode_error(self.name, kind)
            await context.abort(CODES[fault.status], details_of(fault))
            raise AssertionError("abort raises")

        return guarded


def _pairs(text: str) -> dict[str, str]:
    """Return NAME=MODEL;NAME=MODEL as a map. Raises: Fault for another form."""
    pairs = [part.partition("=") for part in text.split(";") if part]
    if not all(name and model for name, _, model in pairs):
        raise Fault("invalid_argument", "option alias of lerobot must be NAME=MODEL;NAME=MODEL.")
    return {name: model for name, _, model in pairs}


def _peer(context: Context) -> tuple[str, str]:
    """Return the key of a robot's connection and its address without the port."""
    peer = context.peer()
    for key, value in context.invocation_metadata() or ():
        if key == "x-session-id" and isinstance(value, str) and 0 < len(value) <= 256:
            return f"id:{value}", peer.rpartition(":")[0]
    return peer, peer.rpartition(":")[0]
