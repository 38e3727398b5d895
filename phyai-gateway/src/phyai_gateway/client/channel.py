"""Where and how a client connects: address, TLS, token, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from phyai_gateway.messages import Fault
from phyai_gateway.proto.status import fault_of

INFER = "/robot.inference.v1.ModelInference/Infer"
HEALTH = "/robot.inference.v1.ModelInference/CheckHealth"
CONTRACT = "/phyai.serving.v1.ModelContracts/GetContract"
DEFAULT_TIMEOUT_S = 10.0

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", 104_857_600),
    ("grpc.max_send_message_length", 104_857_600),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also what a connection attempt may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


@dataclass(frozen=True, slots=True)
class Target:
    """HOST:PORT.  ca: PEM file that proves the server; cert and key prove the client (mTLS).

    robot: key of the server's latest-wins mailbox; None = every request counts.
    """

    address: str
    token: str | None = None
    ca: str | Path | None = None
    cert: str | Path | None = None
    key: str | Path | None = None
    robot: str | None = None

    def open(self, module: Any) -> Any:
        """Return a channel of ``grpc`` or ``grpc.aio``; connects when first used."""
        address = self.address.removeprefix("grpc://")
        if self.ca is None:
            if self.cert is not None or self.key is not None:
                raise ValueError("cert and key need ca, the file that proves the server; got none.")
            return module.insecure_channel(address, _OPTIONS)
        pair = [None if file is None else Path(file).read_bytes() for file in (self.key, self.cert)]
        credentials = grpc.ssl_channel_credentials(Path(self.ca).read_bytes(), *pair)
        return module.secure_channel(address, credentials, _OPTIONS)

    @property
    def metadata(self) -> Sequence[tuple[str, str]]:
        found = []
        if self.token is not None:
            found.append(("authorization", f"Bearer {self.token}"))
        if self.robot is not None:
            found.append(("x-robot-id", self.robot))
        return found


def fault_from(error: Any) -> Fault:
    """Return the fault of a gRPC error, sync or asyncio."""
    found = fault_of(error.code(), error.details(), error.trailing_metadata())
    if found.status == "unavailable" and "failed to connect" in found.message.lower():
        text = f"server must accept a connection; it does not. Is it running? ({found.message})"
        return Fault("unavailable", text, retry_after=found.retry_after, started=found.started)
    return found


def check_timeout(timeout_s: float) -> float:
    """Return seconds; raises ValueError unless positive: 0 would never get an answer."""
    if not 0 < timeout_s <= 600:
        raise ValueError(f"timeout_s must be in (0, 600] seconds; got {timeout_s!r}.")
    return float(timeout_s)
