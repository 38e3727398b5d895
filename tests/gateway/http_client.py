"""A plain HTTP client for tests: the standard library's, beside the event loop."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from phyai_gateway.http_api import HttpApi
from phyai_gateway.protocols.base import ListenerOptions
from tests.gateway.stub_world import World


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Return the code of an error answer."""
        return str(self.json["error"]["code"])


async def fetch(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    context: ssl.SSLContext | None = None,
) -> Answer:
    """Send one request; a body that is not bytes goes as JSON."""

    def work() -> Answer:
        kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
        more: dict[str, Any] = {"context": context} if context else {}
        connection = kind("127.0.0.1", port, timeout=15, **more)
        try:
            found = dict(headers or {})
            data = body
            if body is not None and not isinstance(body, bytes):
                data = json.dumps(body).encode()
                found.setdefault("Content-Type", "application/json")
            connection.request(method, path, data, found)
            answer = connection.getresponse()
            lower = {key.lower(): value for key, value in answer.getheaders()}
            return Answer(answer.status, lower, answer.read())
        finally:
            connection.close()

    return await asyncio.to_thread(work)


@asynccontextmanager
async def served(w: World, **options: Any) -> AsyncIterator[int]:
    """Serve the world's HTTP; gives the port."""
    extra = {key: options.pop(key) for key in ("admin", "infer") if key in options}
    options.setdefault("observer", w.gateway.metrics)
    api = HttpApi(w.gateway, ListenerOptions(**options), **extra)
    port = await api.start()
    w.gateway.listeners.append(api)
    try:
        yield port
    finally:
        await api.stop()
