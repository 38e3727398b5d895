"""Isaac-GR00T's ZMQ policy server, for its three generations of clients.

Clients are ``REQ`` sockets: they can't go on without a reply, so every request gets exactly one,
in the generation's own form. ``kill`` is answered and ignored.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import zmq
import zmq.asyncio

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import ByteBudget, DecodeError
from phyai_gateway.decode.numpy_msgpack import (
    GrootHook,
    MsgpackLimits,
    pack_nd_form,
    pack_npy_form,
    unpack,
)
from phyai_gateway.messages import Call, Fault, InferRequest
from phyai_gateway.protocols import gr00t_observation as observed
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.gr00t_modality import Dialect, Modality
from phyai_gateway.protocols.observation import chunk, ends_session, invalid, names
from phyai_gateway.protocols.options import Settings

_LOG = logging.getLogger(__name__)
_BYTES_HELD = 1 << 30
_MAX_ERROR_TEXT = 1000
_UNAUTHORIZED = "Unauthorized: Invalid API token"
_ENDPOINTS = ("ping", "kill", "get_action", "reset", "get_modality_config")


@dataclass(slots=True)
class _Client:
    """What is remembered of one socket: its generation, and its session of a stateful model.

    told: whether it has shown its generation; not before it has sent an array.
    """

    dialect: Dialect = "c"
    told: bool = False
    session: str = field(default_factory=lambda: uuid.uuid4().hex)
    seq: int = 0

    def begin_session(self) -> None:
        self.session, self.seq = uuid.uuid4().hex, 0


class Gr00tListener:
    """Serves unmodified GR00T clients.

    Options: ``dialect`` a, b or c instead of telling it from the request; ``timeout_s`` of one
    request.
    """

    name: ClassVar[str] = "gr00t"
    default_port: ClassVar[int] = 5555
    takes_tokens: ClassVar[bool] = True
    takes_tls: ClassVar[bool] = False

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        settings = Settings(self.name, options.options)
        self._timeout_s = settings.seconds("timeout_s", None)
        self._forced = settings.text("dialect")
        settings.finish()
        if self._forced not in (None, "a", "b", "c"):
            raise Fault("invalid_argument", "option dialect of gr00t must be a, b or c.")
        self._router, self._options = router, options
        limits = options.limits
        self._msgpack = MsgpackLimits(limits.max_message_bytes, limits.max_prompt_bytes)
        self._budget = ByteBudget(max(_BYTES_HELD, limits.max_message_bytes))
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()
        self._in_flight: Counter[bytes] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._receiver: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Bind, and return the port; raises OSError."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        limits = self._options.limits
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.RCVHWM, limits.per_connection)
        self._socket.setsockopt(zmq.SNDHWM, limits.per_connection)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)  # a client may vanish without a word
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        host, is_v6 = _numeric(self._options.host)
        self._socket.setsockopt(zmq.IPV6, int(is_v6))
        shown = f"[{host}]" if is_v6 else host
        try:
            self._socket.bind(f"tcp://{shown}:{self._options.port or '*'}")
        except zmq.ZMQError as error:
            await self.stop()
            raise OSError(error.errno, f"gr00t can't listen: {error.strerror}") from error
        bound = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT))
        self._receiver = asyncio.create_task(self._receive())
        return int(bound.decode().rpartition(":")[2])

    async def drain(self) -> None:
        """Take nothing new, and return when every request is answered."""
        await self._stop_receiving()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """Close everything; may be called twice."""
        await self._stop_receiving()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = self._socket = None

    async def _stop_receiving(self) -> None:
        if self._receiver is not None:
            self._receiver.cancel()
            with suppress(asyncio.CancelledError):
                await self._receiver
            self._receiver = None

    # ------------------------------------------------------------ transport

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            identity = frames[0].bytes
            if len(frames) != 3 or len(frames[1]) != 0:
                # Not a REQ socket: there is no place in such a message where a reply belongs.
                self._options.observer.decode_error(self.name, "unreadable")
                continue
            task = asyncio.create_task(self._handle(identity, frames[2].buffer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, identity: bytes, body: memoryview) -> None:
        self._in_flight[identity] += 1
        self._options.observer.transferred("in", len(body))
        try:
            reply = await self._answer(identity, body)
        finally:
            self._in_flight[identity] -= 1
            if not self._in_flight[identity]:
                del self._in_flight[identity]
        self._options.observer.transferred("out", len(reply))
        if self._socket is None:
            return
        try:
            # Never waits: behind a client that reads nothing all others' replies would wait too.
            await self._socket.send_multipart([identity, b"", reply], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            _LOG.info("gr00t client left before its reply, or reads none")

    async def _answer(self, identity: bytes, body: memoryview) -> bytes:
        request_id = uuid.uuid4().hex
        limits = self._options.limits
        try:
            total = self._in_flight.total()
            if self._in_flight[identity] > limits.per_connection or total > limits.max_connections:
                raise Fault("resource_exhausted", "too many requests are under way. Try again.")
            with self._budget.hold(len(body)):
                return await self._reply(identity, body, request_id)
        except Fault as fault:
            if fault.status == "invalid_argument":
                kind = "unreadable" if isinstance(fault, DecodeError) else "invalid"
                self._options.observer.decode_error(self.name, kind)
            if fault.status in ("unauthenticated", "permission_denied"):
                return pack_nd_form({"error": _UNAUTHORIZED})
            text = f"{fault.status}: {fault.message[:_MAX_ERROR_TEXT]} (request {request_id})"
            return pack_nd_form({"error": text})
        except Exception:
            _LOG.exception("gr00t request %s failed", request_id)
            return pack_nd_form(
                {"error": f"internal: the server failed on this request (request {request_id})"}
            )

    # ------------------------------------------------------------ requests

    async def _reply(self, identity: bytes, body: memoryview, request_id: str) -> bytes:
        hook = GrootHook()
        found = unpack(body, hook, self._msgpack)
        if not isinstance(found, dict):
            raise DecodeError("request must be a map.")
        principal = self._principal(found)
        endpoint = found.get("endpoint", "get_action")
        if not isinstance(endpoint, str) or endpoint not in _ENDPOINTS:
            raise invalid(f"endpoint must be one of {', '.join(_ENDPOINTS)}.")
        data = found.get("data")
        client = self._client(identity, hook.form, data)
        if endpoint == "ping":
            return pack_nd_form({"status": "ok", "message": "Server is running"})
        if endpoint == "kill":
            _LOG.warning("a gr00t client asked the server to stop; ignored")
            return pack_nd_form({})
        if endpoint == "reset":
            _check_keys(data if data is not None else {}, ("options",))
            client.begin_session()
            return pack_nd_form({})
        contract = self._router.contract(self._model())
        if endpoint == "get_modality_config":
            known = client.dialect if client.told else None
            return pack_nd_form(Modality.of(contract).reply(known))
        return await self._action(data, client, contract, (identity, principal, request_id))

    def _principal(self, found: Mapping[str, Any]) -> str | None:
        tokens = self._options.tokens
        if tokens is None:
            return None
        token = found.get("api_token")
        return tokens.check(token if isinstance(token, str) else None, "infer")

    def _client(self, identity: bytes, form: str | None, data: object) -> _Client:
        client = self._clients.pop(identity, None) or _Client()
        self._clients[identity] = client  # the one used last stays longest
        while len(self._clients) > self._options.limits.max_sessions:
            self._clients.popitem(last=False)
        client.told = client.told or form is not None or self._forced is not None
        if self._forced is not None:
            client.dialect = cast(Dialect, self._forced)
        elif form == "nd":
            client.dialect = "c"
        elif form == "npy":
            wrapped = isinstance(data, dict) and "observation" in data
            client.dialect = "b" if wrapped else "a"
        return client

    def _model(self) -> str:
        if self._options.default_model is not None:
            return self._options.default_model
        known = self._router.models()
        if len(known) != 1:
            raise Fault(
                "failed_precondition",
                f"this listener must be started for one model of {names(known)}.",
            )
        return known[0]

    async def _action(
        self,
        data: object,
        client: _Client,
        contract: ModelContract,
        who: tuple[bytes, str | None, str],
    ) -> bytes:
        identity, principal, request_id = who
        observation, options = _arguments(data, client.dialect)
        parts = observed.split(observation)
        found = observed.request_of(
            parts,
            contract,
            request_id,
            batched=client.dialect != "a",
            max_prompt_bytes=self._options.limits.max_prompt_bytes,
        )
        request = _with_options(found.request, options, contract)
        if contract.stateful:
            own = {"session_id": client.session, "seq": client.seq}
            request = replace(request, options={**request.options, **own})
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        call = Call(self.name, deadline, f"gr00t:{identity.hex()}", principal)
        try:
            reply = await self._router.infer(request, call)
        except Fault as fault:
            if ends_session(fault):
                client.begin_session()
            raise
        client.seq += 1
        actions = observed.actions_of(
            chunk(reply, contract, found.rows),
            Modality.of(contract),
            nested=parts.nested,
            batched=client.dialect != "a",
        )
        if client.dialect == "a":
            return pack_npy_form(actions)
        pack = pack_npy_form if client.dialect == "b" else pack_nd_form
        return pack([actions, {}])


def _arguments(data: object, dialect: Dialect) -> tuple[dict[Any, Any], Any]:
    if not isinstance(data, dict):
        raise invalid("data of get_action must be a map.")
    if dialect == "a" and "observation" not in data:
        return data, None
    _check_keys(data, ("observation", "options"))
    observation = data.get("observation")
    if not isinstance(observation, dict):
        raise invalid("data of get_action must hold a map observation.")
    return observation, data.get("options")


def _check_keys(data: object, known: tuple[str, ...]) -> None:
    if not isinstance(data, dict) or any(key not in known for key in data):
        raise invalid(f"data must be a map with no keys but {', '.join(known)}.")


def _with_options(request: InferRequest, options: Any, contract: ModelContract) -> InferRequest:
    """Return the request with the options that the model has; others are a client's mistake."""
    if options is None or options == {}:
        return request
    if not isinstance(options, dict) or any(key not in contract.options for key in options):
        raise invalid(f"options must be of {names(contract.options)}.")
    if not all(isinstance(value, bool | int | float | str) for value in options.values()):
        raise invalid("options must be numbers or texts.")
    return replace(request, options={**request.options, **options})


def _numeric(host: str) -> tuple[str, bool]:
    """Return the address of a host name, and whether it is an IPv6 one."""
    family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return str(address[0]), family == socket.AF_INET6
