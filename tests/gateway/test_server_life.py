"""The life of a model server: drains with and without time left; health and metrics over HTTP."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from phyai_gateway.client import AsyncClient, ServerUnavailable
from tests.gateway.serving import GATE, address, pictures, run, serving, state
from tests.gateway.serving import isolated as isolated


async def fails(call: Any, kind: type[ServerUnavailable]) -> ServerUnavailable:
    with pytest.raises(kind) as caught:
        await call
    return caught.value


def test_drain_answers_what_was_accepted(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_queue=3) as server, AsyncClient(address(server)) as c:
            assert server.host is not None
            GATE.shut()
            tasks = [asyncio.create_task(c.infer(pictures(), state(), "go")) for _ in range(3)]
            await GATE.reached()
            while server.host.dispatcher.waiting < 2:
                await asyncio.sleep(0.01)
            draining = asyncio.create_task(server.drain(20.0))
            while server.not_ready() != "draining":
                await asyncio.sleep(0.01)
            error = await fails(c.infer(pictures(), state(), "go"), ServerUnavailable)
            assert not error.started
            assert not await c.ready()
            GATE.open()
            assert [found.shape for found in await asyncio.gather(*tasks)] == [(6, 3)] * 3
            assert await draining

    run(test)


def test_drain_ends_with_the_grace(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            GATE.shut()
            task = asyncio.create_task(client.infer(pictures(), state(), "go"))
            await GATE.reached()
            began = time.monotonic()
            assert not await server.drain(0.2)
            assert time.monotonic() - began < 10
            task.cancel()

    run(test)


def test_http_port(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as server, AsyncClient(address(server)) as client:
            port = server.ports["http"]
            await client.infer(pictures(), state(), "go")
            assert (await _get(port, "/health"))[0] == 200
            assert (await _get(port, "/health/ready"))[0] == 200
            assert (await _get(port, "/health/model/scale"))[0] == 200
            assert (await _get(port, "/health/model/other"))[0] == 404
            status, body = await _get(port, "/v1/models/scale")
            assert status == 200
            assert '"horizon":6' in body
            status, body = await _get(port, "/metrics")
            wanted = 'phyai_requests_total{model="scale",outcome="ok",protocol="native"} 1.0'
            assert wanted in body
            assert 'phyai_replica_requests_total{replica="0"} 2.0' in body  # and the warm-up
            assert "phyai_queue_time_seconds_count 1.0" in body
            assert 'phyai_replica_busy_seconds_total{replica="0"}' in body
            server._draining = True
            status, body = await _get(port, "/health/ready")
            assert status == 503
            assert "draining" in body

    run(test)


async def _get(port: int, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    raw = (await reader.read()).decode()
    writer.close()
    head, _, body = raw.partition("\r\n\r\n")
    return int(head.split()[1]), body
