"""Connections by hand that no client library would make: half requests, byte by byte, or too much.

``OPENINGS`` says, by listener, what a slow client sends at once and what it then sends drop by
drop, for ever.
"""

from __future__ import annotations

import asyncio
import struct
import time
from contextlib import suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 3) + b"REQ"


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + body
    )


def _header(name: str, value: str) -> bytes:
    """Return one HPACK field, not indexed and not compressed."""
    parts = b"".join(bytes([len(text)]) + text.encode() for text in (name, value))
    return b"\x00" + parts


def call_opening(path: str) -> bytes:
    """Return the beginning of a gRPC call whose message is announced and does not come."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(_header(name, value) for name, value in headers.items())
    # A window large enough for all answers, headers, and of the message its length alone.
    opening = PREFACE + _frame(4, 0, 0, b"") + _frame(1, 4, 1, block)
    return opening + _frame(0, 0, 1, b"\0" + struct.pack(">I", 1000))


DATA_DROP = _frame(0, 0, 1, b"x")
POST = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nContent-Length: 9999\r\n\r\n"

_CALLS = {
    "native": "/robot.inference.v1.ModelInference/Infer",
    "lerobot": "/transport.AsyncInference/SendObservations",
}
_GRPC = {
    name: {"nothing": (b"", b""), "half a call": (call_opening(path), DATA_DROP)}
    for name, path in _CALLS.items()
}
_HEAD = (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"A")


def _web(path: bytes, kind: bytes) -> dict[str, tuple[bytes, bytes]]:
    return {"nothing": (b"", b""), "half a head": _HEAD, "half a body": (POST % (path, kind), b"{")}


OPENINGS: dict[str, dict[str, tuple[bytes, bytes]]] = {
    **_GRPC,
    "openpi": {
        "nothing": (b"", b""),
        "half a head": _HEAD,
        "half a frame": (UPGRADE + b"\x82\xff" + struct.pack(">Q", 1 << 20) + bytes(4), b"x"),
    },
    "gr00t": {"nothing": (b"", b""), "half a greeting": (GREETING[:11], b"")},
    "rlinf": _web(b"/v1/actions/generations", b"application/msgpack"),
    "kserve": _web(b"/v2/models/stub/infer", b"application/json"),
    "http": _web(b"/v1/backends", b"application/json"),
}

IDLE = {
    "native": PREFACE + _frame(4, 0, 0, b""),
    "lerobot": PREFACE + _frame(4, 0, 0, b""),
    "openpi": UPGRADE,
    "gr00t": GREETING + b"\x04" + bytes([len(READY)]) + READY,
    "rlinf": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "kserve": b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http": b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
"""What a connection says that is a protocol's own, and then nothing more."""


async def dripping(port: int, opening: bytes, drop: bytes, every_s: float = 0.5) -> float:
    """Connect, send the opening and then drop by drop; return the seconds until it is over.

    Over is: closed by the server, or its call or request answered.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()

    async def drips() -> None:
        with suppress(OSError):
            writer.write(opening)
            while True:
                await writer.drain()
                await asyncio.sleep(every_s)
                writer.write(drop)

    sending = asyncio.create_task(drips())
    try:
        with suppress(OSError):
            while data := await reader.read(65536):
                if b"grpc-status" in data or data.startswith(b"HTTP/1.1 4"):
                    break
                if data.startswith(b"HTTP/1.1 5"):
                    break
        return time.monotonic() - began
    finally:
        sending.cancel()
        writer.transport.abort()
