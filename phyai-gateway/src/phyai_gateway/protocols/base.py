"""What a protocol sees of the gateway or model server, and what they see of a protocol.

A listener translates: bytes to ``InferRequest``, ``InferReply`` or ``Fault`` to bytes.  Routing,
queues and deadlines are the router's.  Listeners are found by entry point, group
``phyai.protocols``, value ``module:Class``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Call, InferReply, InferRequest

if TYPE_CHECKING:
    from phyai_gateway.tls import TlsFiles
    from phyai_gateway.tokens import TokenStore

MIB = 1 << 20


class Router(Protocol):
    """Where a listener sends requests: the gateway's pool, or the one engine of a model server."""

    def models(self) -> tuple[str, ...]:
        """Return the model names that can be asked for, sorted."""

    def contract(self, model: str) -> ModelContract:
        """Return what the model takes and gives; raises Fault("not_found"), or ("unavailable")
        while no server of it has answered yet."""

    async def infer(self, request: InferRequest, call: Call) -> InferReply:
        """Return the one answer to the request; raises Fault. Cancelling it gives up the work.

        The request object reaches the backend unchanged, so a subclass may carry encoded bytes.
        ``options["session_id"]`` keeps a stateful model's requests on one backend.
        """


class Observer(Protocol):
    """Counters of what only a listener sees. Reasons and protocols come from fixed sets."""

    def dropped(self, reason: str) -> None:
        """Count a dropped observation: superseded, stale, duplicate or similar."""

    def decode_error(self, protocol: str, reason: str) -> None:
        """Count bytes that were refused before a request existed."""

    def sessions(self, protocol: str, count: int) -> None:
        """Say how many sessions or connections the listener holds now."""

    def transferred(self, direction: str, count: int) -> None:
        """Count payload bytes, ``in`` or ``out``."""


class NoObserver:
    """Counts nothing."""

    def dropped(self, reason: str) -> None: ...
    def decode_error(self, protocol: str, reason: str) -> None: ...
    def sessions(self, protocol: str, count: int) -> None: ...
    def transferred(self, direction: str, count: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Caps that hold before memory is taken. per_connection: requests in flight on one."""

    max_message_bytes: int = 64 * MIB
    max_connections: int = 256
    max_sessions: int = 256
    per_connection: int = 4
    max_prompt_bytes: int = 64 * 1024
    receive_timeout_s: float = 30.0
    """Longest time that one request's bytes may take to arrive, headers included."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """port 0: any free one. tokens: None = none asked for. default_model: for requests that name
    none. options: the protocol's own, as text; a listener refuses those it does not know.
    reflection: gRPC listeners describe their services to whoever asks. reuse_port: other processes
    serve the same port, those of ``shares_port`` only."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    tokens: TokenStore | None = None
    limits: Limits = field(default_factory=Limits)
    default_model: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    observer: Observer = field(default_factory=NoObserver)
    reflection: bool = False
    reuse_port: bool = False


@runtime_checkable
class Listener(Protocol):
    """One protocol on one port.

    takes_tokens, takes_tls: whether its clients can present a token or speak TLS at all; without
    either, another address than loopback needs ``--insecure-bind``.
    """

    name: ClassVar[str]
    default_port: ClassVar[int]
    takes_tokens: ClassVar[bool]
    takes_tls: ClassVar[bool]

    # And optionally ``shares_port``, a bool: whether several processes may serve one port, because
    # no request needs what another one left behind. Absent = no.

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        """Check the options; raises Fault("invalid_argument"). Binds nothing yet."""

    async def start(self) -> int:
        """Bind exactly host and port, and return the bound port; raises OSError."""

    async def drain(self) -> None:
        """Take nothing new and return when what was accepted is answered."""

    async def stop(self) -> None:
        """Close everything at once; may be called twice, or without start."""
