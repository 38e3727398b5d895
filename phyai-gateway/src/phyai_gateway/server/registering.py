"""A model server announces itself to gateways: registers, sends heartbeats, falls silent to leave.

Each gateway is looked after by itself and for ever: one that is not there yet, restarts or forgot
this server is registered with again.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai.errors import ConfigError
from phyai_gateway.listeners import format_endpoint, parse_endpoint
from phyai_gateway.server.config import ServerOptions

log = logging.getLogger("phyai.server")

CALL_TIMEOUT_S = 2.0
RETRY_S = 1.0
DEFAULT_INTERVAL_S = 5.0
LONGEST_INTERVAL_S = 60.0
REGISTRY = "/robot.inference.v1.ModelRegistry"


@dataclass(frozen=True, slots=True)
class Announcement:
    """What is announced where. host, port: as gateways reach the server; port None = its own.

    token: with scope ``admin`` at the gateways, or None.  ca: PEM bytes to speak TLS, or None.
    """

    gateways: tuple[str, ...]
    model: str
    host: str
    port: int | None
    token: str | None = None
    ca: bytes | None = None

    def endpoint(self, native_port: int) -> str:
        """Return HOST:PORT for a server that listens on ``native_port``."""
        return format_endpoint(self.host, self.port or native_port)


def announcement(server: ServerOptions) -> Announcement | None:
    """Return what the file asks for, None = nothing; raises ConfigError for unreadable files."""
    if not server.register_with:
        return None
    gateways = tuple(format_endpoint(*parse_endpoint(text)) for text in server.register_with)
    host, port = server.advertised()
    return Announcement(
        gateways,
        server.model_name,
        host,
        port,
        _token(server.register_token_file) if server.register_token_file else None,
        _authority(server.register_ca) if server.register_ca else None,
    )


def _token(file: str) -> str:
    try:
        found = Path(file).read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise ConfigError(f"server.register_token_file must be readable; {reason}.") from None
    if not found or not found.isprintable() or " " in found:
        raise ConfigError("server.register_token_file must hold one token; it does not.")
    return found


def _authority(file: str) -> bytes:
    try:
        ssl.create_default_context(cafile=file)
        return Path(file).read_bytes()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"server.register_ca must be a readable PEM file; got {error}.") from None


class Registrar:
    """Keeps a server listed.

    retry_s: seconds between attempts at a gateway that does not answer.  longest_s: between
    heartbeats, whatever a gateway asks for.
    """

    def __init__(
        self,
        wanted: Announcement,
        native_port: int,
        *,
        retry_s: float = RETRY_S,
        longest_s: float = LONGEST_INTERVAL_S,
    ) -> None:
        self._wanted, self._endpoint = wanted, wanted.endpoint(native_port)
        self._retry_s, self._longest_s = retry_s, longest_s
        self._tasks: list[asyncio.Task[None]] = []
        self.listed: dict[str, str] = {}
        """Gateways that list the server now, and the id it has there."""

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._keep(gateway), name=f"register-{gateway}")
            for gateway in self._wanted.gateways
        ]

    async def stop(self) -> None:
        """Fall silent; may be called twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.listed.clear()

    async def _keep(self, gateway: str) -> None:
        told = ""
        while True:
            try:
                await self._once(gateway)
                told = ""
            except Exception as error:  # of whatever kind: a server without gateway is useless
                text = _reason(error)
                if text != told:
                    log.warning("gateway %s does not list this server: %s", gateway, text)
                told = text
            self.listed.pop(gateway, None)
            await asyncio.sleep(self._retry_s)

    async def _once(self, gateway: str) -> None:
        """Register and send heartbeats until the gateway no longer knows the server; raises what
        went wrong."""
        from phyai_gateway.proto import robot_inference_v1_pb2 as pb

        async with _channel(gateway, self._wanted.ca) as channel:
            asked = pb.RegisterRequest(endpoint=self._endpoint, model_name=self._wanted.model)
            found = await self._call(channel, "Register", asked, pb.RegisterResponse)
            if not found.accepted:
                raise _Refused(found.message)
            self.listed[gateway] = found.server_id
            log.info("gateway %s lists this server as %s", gateway, self._endpoint)
            pause = min(found.heartbeat_interval_seconds or DEFAULT_INTERVAL_S, self._longest_s)
            beat = pb.HeartbeatRequest(server_id=found.server_id)
            while True:
                await asyncio.sleep(pause)
                heard = await self._call(channel, "Heartbeat", beat, pb.HeartbeatResponse)
                if not heard.registered:
                    return

    async def _call(self, channel: Any, method: str, request: Any, kind: Any) -> Any:
        token = self._wanted.token
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        call = channel.unary_unary(
            f"{REGISTRY}/{method}", lambda message: message.SerializeToString(), kind.FromString
        )
        return await call(request, timeout=CALL_TIMEOUT_S, metadata=metadata)


class _Refused(Exception):
    """The gateway said no, in words."""


def _channel(gateway: str, ca: bytes | None) -> Any:
    import grpc.aio

    options: Sequence[tuple[str, Any]] = (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    )
    if ca is None:
        return grpc.aio.insecure_channel(gateway, options)
    return grpc.aio.secure_channel(gateway, grpc.ssl_channel_credentials(ca), options)


def _reason(error: Exception) -> str:
    import grpc.aio

    if isinstance(error, grpc.aio.AioRpcError):
        text = f"{error.code().name}: {error.details()}"
    else:
        text = str(error) or type(error).__name__
    return " ".join(text[:300].split())  # a gateway's words must not look like lines of the log
