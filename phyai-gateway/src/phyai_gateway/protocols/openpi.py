"""openpi's WebSocket protocol, and the two dialects that share its frames.

Paths: ``/`` (openpi), ``/openpi/policy`` and ``/v1/realtime/robot/openpi`` (with ``endpoint`` and
``session_id`` in the map), ``/models/NAME`` or ``?model=NAME`` for another model than the default.
``GET /healthz`` answers on the same port.
"""

from __future__ import annotations

import asyncio
import http
import logging
import ssl
import time
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.http11 import Request, Response

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import ByteBudget, DecodeError
from phyai_gateway.decode.numpy_msgpack import MsgpackLimits, openpi_hook, pack_openpi, unpack
from phyai_gateway.messages import Call, Fault, InferRequest
from phyai_gateway.protocols import openpi_observation as frames
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.observation import chunk, ends_session, invalid, names
from phyai_gateway.protocols.options import Settings

_LOG = logging.getLogger(__name__)
_POLICY, _REALTIME = "/openpi/policy", "/v1/realtime/robot/openpi"
_MAX_ERROR_TEXT = 1000
_BYTES_HELD = 1 << 30


@dataclass(frozen=True, slots=True)
class Route:
    """What a connection asks for. controls: its maps may hold ``endpoint`` and ``session_id``."""

    model: str
    controls: bool
    error_maps: bool


@dataclass(slots=True)
class _Session:
    """One connection. sequences: session id and answered requests by key, for models with state.

    closed: done when the client has left.
    """

    route: Route
    contract: ModelContract
    principal: str | None
    key: str
    closed: asyncio.Future[None]
    generation: int = 0
    sequences: dict[str, tuple[str, int]] = field(default_factory=dict)
    last_total_ms: float | None = None


class OpenpiListener:
    """Serves unmodified openpi clients.

    Options: ``timeout_s`` of one request; ``loading_s``, how long the first frame may wait for a
    model that is still loading.
    """

    name: ClassVar[str] = "openpi"
    default_port: ClassVar[int] = 8000
    takes_tokens: ClassVar[bool] = True
    takes_tls: ClassVar[bool] = True
    shares_port: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        settings = Settings(self.name, options.options)
        self._timeout_s = settings.seconds("timeout_s", None)
        self._loading_s = settings.seconds("loading_s", 300.0) or 0.0
        settings.finish()
        self._router, self._options = router, options
        limits = options.limits
        self._msgpack = MsgpackLimits(limits.max_message_bytes, limits.max_prompt_bytes)
        self._budget = ByteBudget(max(_BYTES_HELD, limits.max_message_bytes))
        self._server: Server | None = None
        self._connections: dict[ServerConnection, _Session | None] = {}
        self._busy: set[ServerConnection] = set()
        self._draining = False
        self._context: ssl.SSLContext | None = None

    async def start(self) -> int:
        """Bind, and return the port; raises OSError."""
        limits, tls = self._options.limits, self._options.tls
        self._context = None if tls is None else tls.server_context()
        self._server = await serve(
            self._serve,
            self._options.host,
            self._options.port,
            process_request=self._before_upgrade,
            compression=None,
            max_size=limits.max_message_bytes,
            max_queue=1,
            open_timeout=min(limits.receive_timeout_s, 10.0),
            close_timeout=2.0,
            server_header=None,
            ssl=self._context,
            reuse_port=self._options.reuse_port or None,
        )
        port: int = next(iter(self._server.sockets)).getsockname()[1]
        return port

    def reload_tls(self) -> None:
        """Use the certificate files as they are now for new connections."""
        if self._options.tls is not None and self._context is not None:
            self._options.tls.reload(self._context)

    async def drain(self) -> None:
        """Close idle connections, and the others after their answer (code 1001)."""
        self._draining = True
        if self._server is None:
            return
        self._server.close(close_connections=False)
        idle = [c for c in self._connections if c not in self._busy]
        await asyncio.gather(*(c.close(1001, "server is going away") for c in idle))
        while self._connections:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Close everything; may be called twice."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    # ------------------------------------------------------------ before the upgrade

    def _before_upgrade(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path.partition("?")[0] == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        try:
            self._principal(request)
        except Fault as fault:
            known = fault.status == "permission_denied"
            status = http.HTTPStatus.FORBIDDEN if known else http.HTTPStatus.UNAUTHORIZED
            return connection.respond(status, f"{fault.message}\n")
        if len(self._connections) >= self._options.limits.max_connections or self._draining:
            busy = http.HTTPStatus.SERVICE_UNAVAILABLE
            return connection.respond(busy, "no more connections are taken; try again later\n")
        try:
            self._contract_or_none(self.route(request.path).model)
        except Fault as fault:
            return connection.respond(http.HTTPStatus.NOT_FOUND, f"{fault.message}\n")
        return None

    def _principal(self, request: Request) -> str | None:
        tokens = self._options.tokens
        if tokens is None:
            return None
        return tokens.check_header(request.headers.get("Authorization"), "infer")

    def route(self, path: str) -> Route:
        """Return what a path asks for. Raises: Fault ``not_found``."""
        try:
            parts = urlsplit(path)
            asked = parse_qs(parts.query, max_num_fields=16).get("model", [])
        except ValueError:
            raise Fault("not_found", "path must be a URL's, with at most 16 parameters.") from None
        model = asked[0] if asked else self._options.default_model
        if parts.path.startswith("/models/"):
            model = unquote(parts.path.removeprefix("/models/"))
        elif parts.path not in ("/", "", _POLICY, _REALTIME):
            raise Fault("not_found", f"path must be /, {_POLICY}, {_REALTIME} or /models/NAME.")
        known = self._router.models()
        if model is None and len(known) == 1:
            model = known[0]
        if model is None:
            raise Fault("not_found", f"a model must be named: one of {names(known)}.")
        return Route(model, parts.path in (_POLICY, _REALTIME), parts.path == _REALTIME)

    def _contract_or_none(self, model: str) -> ModelContract | None:
        """Return the contract; None while no server of the model has answered."""
        try:
            return self._router.contract(model)
        except Fault as fault:
            if fault.status == "unavailable":
                return None
            raise

    # ------------------------------------------------------------ one connection

    async def _serve(self, connection: ServerConnection) -> None:
        self._connections[connection] = None
        self._options.observer.sessions(self.name, len(self._connections))
        try:
            await self._converse(connection)
        except ConnectionClosed:
            pass
        finally:
            del self._connections[connection]
            self._options.observer.sessions(self.name, len(self._connections))

    async def _converse(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        route = self.route(connection.request.path)
        try:
            contract = await self._loaded(connection, route.model)
        except Fault as fault:
            await connection.send(f"{fault.status}: {fault.message[:_MAX_ERROR_TEXT]}")
            await connection.close(1013, "not ready")
            return
        principal = self._principal(connection.request)
        closed = asyncio.ensure_future(connection.wait_closed())
        session = _Session(route, contract, principal, connection.id.hex, closed)
        self._connections[connection] = session
        try:
            await connection.send(pack_openpi(frames.metadata_of(contract)))
            await self._answer_all(connection, session)
        finally:
            closed.cancel()

    async def _answer_all(self, connection: ServerConnection, session: _Session) -> None:
        async for message in connection:
            self._busy.add(connection)
            try:
                going_on = await self._answer(connection, session, message)
            finally:
                self._busy.discard(connection)
            if self._draining and going_on:
                await connection.close(1001, "server is going away")
            if self._draining or not going_on:
                return

    async def _loaded(self, connection: ServerConnection, model: str) -> ModelContract:
        """Return the contract once it is known; a client that leaves meanwhile is not waited for.

        Raises: Fault; ConnectionClosed.
        """
        end = time.monotonic() + self._loading_s
        while (contract := self._contract_or_none(model)) is None:
            if time.monotonic() >= end:
                raise Fault("unavailable", f"model {model!r} is not ready.")
            with suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    await connection.wait_closed()
                raise ConnectionClosedOK(None, None)
        return contract

    async def _answer(
        self, connection: ServerConnection, session: _Session, message: str | bytes
    ) -> bool:
        """Answer one frame; returns whether the connection goes on."""
        request_id = uuid.uuid4().hex
        code = 1011
        try:
            if isinstance(message, str):
                code = 1003
                raise DecodeError("frames must be binary msgpack; got a text frame.")
            self._options.observer.transferred("in", len(message))
            with self._budget.hold(len(message)):
                reply = await _unless(session.closed, self._reply(session, message, request_id))
        except Fault as fault:
            if isinstance(fault, DecodeError):
                self._options.observer.decode_error(self.name, "unreadable")
            elif fault.status == "invalid_argument":
                self._options.observer.decode_error(self.name, "invalid")
            return await self._refuse(connection, session, fault, request_id, code)
        except Exception:
            _LOG.exception("openpi request %s failed", request_id)
            bug = Fault("internal", "the server failed on this request.")
            return await self._refuse(connection, session, bug, request_id, code)
        self._options.observer.transferred("out", len(reply))
        await connection.send(reply)
        return True

    async def _refuse(
        self,
        connection: ServerConnection,
        session: _Session,
        fault: Fault,
        request_id: str,
        code: int,
    ) -> bool:
        text = f"{fault.status}: {fault.message[:_MAX_ERROR_TEXT]} (request {request_id})"
        late = fault.status == "deadline_exceeded"
        if session.route.error_maps and code == 1011 and not late:
            await connection.send(pack_openpi({"type": "error", "message": text}))
            return True
        await connection.send(text)
        await connection.close(code, fault.status)
        return False

    # ------------------------------------------------------------ one request

    async def _reply(self, session: _Session, message: bytes, request_id: str) -> bytes:
        started = time.perf_counter()
        found = unpack(message, openpi_hook, self._msgpack)
        if not isinstance(found, dict):
            raise DecodeError("frame must hold a map.")
        key = session.key
        if session.route.controls:
            key = _session_key(found, session)
            endpoint = found.get("endpoint", "infer")
            if endpoint == "reset":
                session.sequences.clear()
                session.generation += 1
                return pack_openpi({"status": "reset successful"})
            if endpoint != "infer":
                raise invalid("endpoint must be infer or reset.")
        contract = self._router.contract(session.contract.name)
        most = self._options.limits.max_prompt_bytes
        if frames.is_slow(found):
            request = await asyncio.to_thread(frames.request_of, found, contract, request_id, most)
        else:
            request = frames.request_of(found, contract, request_id, most)
        if contract.stateful:
            request = _in_session(request, session, key)
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        call = Call(self.name, deadline, f"openpi:{session.key}", session.principal)
        try:
            reply = await self._router.infer(request, call)
        except Fault as fault:
            if ends_session(fault) and session.sequences.pop(key, None) is not None:
                session.generation += 1
            raise
        if contract.stateful:
            name, seq = session.sequences[key]
            session.sequences[key] = name, seq + 1
        actions = chunk(reply, contract, rows=1)
        infer_ms = (time.perf_counter() - started) * 1000
        server = {"infer_ms": infer_ms}
        if session.last_total_ms is not None:
            server["prev_total_ms"] = session.last_total_ms
        policy = {"infer_ms": reply.inference_time_us / 1000}
        packed = pack_openpi(
            frames.result_of(actions, {"policy_timing": policy, "server_timing": server})
        )
        session.last_total_ms = (time.perf_counter() - started) * 1000
        return packed


async def _unless(closed: asyncio.Future[None], work: Awaitable[bytes]) -> bytes:
    """Return the work's result; give it up when the client leaves.

    The work stays in this task: one of its own for every request costs more than reading it.
    Raises: Fault ``cancelled``, and what the work raises.
    """
    task, working, left = asyncio.current_task(), True, False
    assert task is not None

    def give_up(_: asyncio.Future[None]) -> None:
        nonlocal left
        if working:
            left = True
            task.cancel()

    closed.add_done_callback(give_up)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise Fault("cancelled", "client left.") from None
        raise
    finally:
        working = False
        closed.remove_done_callback(give_up)


def _session_key(found: dict[str, Any], session: _Session) -> str:
    """Return the key of the robot's session: its own name for it, else the connection."""
    given = found.get("session_id")
    if given is None:
        return session.key
    if not isinstance(given, str) or not 0 < len(given) <= 256:
        raise invalid("session_id must be text of 1 to 256 characters.")
    return given


def _in_session(request: InferRequest, session: _Session, key: str) -> InferRequest:
    if key not in session.sequences and len(session.sequences) >= 16:
        raise Fault("resource_exhausted", "one connection may have at most 16 sessions.")
    fresh = f"{key}#{session.generation}" if session.generation else key
    name, seq = session.sequences.setdefault(key, (fresh, 0))
    return replace(request, options={**request.options, "session_id": name, "seq": seq})
