"""Reading HTTP requests within limits, and giving up the work when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from phyai_gateway import trace
from phyai_gateway.messages import Call, Fault
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.tokens import Scope

T = TypeVar("T")
MAX_TIMEOUT_MS = 600_000


class TooLarge(Exception):
    """The body has more bytes than allowed."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"body must have at most {limit} bytes; it has more.")


class BadLength(Exception):
    """Content-Length is no length, or not the body's."""


async def read_body(request: Request, options: ListenerOptions, limit: int | None = None) -> bytes:
    """Return the body; raises TooLarge, BadLength, Fault when it is too slow."""
    cap = options.limits.max_message_bytes if limit is None else limit
    declared = _declared_length(request)
    if declared is not None and declared > cap:
        raise TooLarge(cap)
    parts, size = [], 0
    try:
        async with asyncio.timeout(options.limits.receive_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > cap:
                    raise TooLarge(cap)
                parts.append(part)
    except TimeoutError:
        raise Fault(
            "deadline_exceeded",
            f"body must arrive within {options.limits.receive_timeout_s:g} s; it did not.",
        ) from None
    except ClientDisconnect:
        raise Fault("cancelled", "client left before its request was complete.") from None
    options.observer.transferred("in", size)
    return b"".join(parts)


def _declared_length(request: Request) -> int | None:
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise BadLength(f"Content-Length must be a number of bytes; got {text!r:.40}.")
    return int(text)


def principal_of(request: Request, options: ListenerOptions, scope: Scope) -> str | None:
    """Return who asks; None where no tokens are used. Raises Fault."""
    if options.tokens is None:
        return None
    return options.tokens.check_header(request.headers.get("authorization"), scope)


def call_of(request: Request, protocol: str, principal: str | None) -> Call:
    """Return the circumstances: X-Request-Timeout-Ms, X-Robot-Id; raises Fault.

    Keeps the trace context of the request, too.
    """
    trace.note(request.headers.get)
    deadline = None
    if (text := request.headers.get("x-request-timeout-ms")) is not None:
        if not text.isascii() or not text.isdigit() or not 0 < len(text) <= 9:
            raise Fault(
                "invalid_argument",
                f"X-Request-Timeout-Ms must be milliseconds; got {text!r:.40}.",
            )
        deadline = time.monotonic() + min(int(text), MAX_TIMEOUT_MS) / 1e3
    robot = request.headers.get("x-robot-id") or None
    if robot is not None and len(robot) > 256:
        raise Fault("invalid_argument", "X-Robot-Id must have at most 256 characters.")
    peer = request.client.host if request.client else ""
    return Call(protocol, deadline=deadline, robot=robot, principal=principal, peer=peer)


async def while_connected(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """Return what the work gives; cancels it when the client disconnects.

    The body must have been read. Raises Fault("cancelled") after a disconnect.
    """
    running: asyncio.Task[T] = asyncio.ensure_future(_run(work))
    left = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({running, left}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Fault("cancelled", "client left before the answer was there.", started=True)
    finally:
        for task in (running, left):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


async def _run(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
