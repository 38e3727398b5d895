"""Clients that are slow, silent, idle or gone, at every listener: the others do not notice."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from websockets.asyncio.client import connect

from tests.faults import bad_servers as bad
from tests.faults.askers import ASK
from tests.faults.processes import PORTS, Gateway, Model, eventually, run, running
from tests.faults.raw_clients import IDLE, OPENINGS, dripping
from tests.faults.robots import INFER, message

pytestmark = pytest.mark.slow
SERVED_S = 20.0  # one exchange of any protocol, on a machine that does much else
GIVEN_UP_S = 100.0  # after which no slow client holds a connection or a call any more: 35 s alone
MIB = 1 << 20


async def ask_all(gateway: Gateway) -> float:
    """Ask once in every protocol; returns the longest time that one took."""
    slowest = 0.0
    for name, ask in ASK.items():
        began = time.monotonic()
        await asyncio.to_thread(ask, gateway.ports[name], SERVED_S)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_slow_and_vanished_clients_are_dropped_and_the_others_served() -> None:
    """10 slow ones of each kind at each listener, and robots whose network is gone."""

    async def work() -> None:
        model = Model(3)
        gateway = Gateway([model.endpoint], protocols=PORTS)
        async with running(model, gateway), AsyncExitStack() as stack:
            await ask_all(gateway)
            vanished = await _vanished(gateway, stack)
            before, memory = gateway.descriptors(), gateway.rss()
            began = time.monotonic()
            drips = {
                (name, kind): [
                    asyncio.create_task(dripping(gateway.ports[name], *opening)) for _ in range(10)
                ]
                for name, kinds in OPENINGS.items()
                for kind, opening in kinds.items()
            }
            slowest, asked = 0.0, 0
            while time.monotonic() - began < GIVEN_UP_S:
                slowest, asked = max(slowest, await ask_all(gateway)), asked + 1
                if all(task.done() for tasks in drips.values() for task in tasks):
                    break
            print(f"{asked} exchanges of each protocol meanwhile, slowest {slowest:.2f} s")
            for key, tasks in drips.items():
                took = [task.result() if task.done() else None for task in tasks]
                print(key, took[0])
                assert None not in took, f"{key} is still there after {GIVEN_UP_S} s"
            for name, wire in vanished.items():

                async def ended(wire: bad.Wire = wire) -> bool:
                    return wire.ended > 0

                left = max(began + GIVEN_UP_S - time.monotonic(), 1.0)
                await eventually(ended, left, f"the vanished client of {name} is dropped")

            async def closed() -> bool:
                return gateway.descriptors() <= before + 5  # its own, opened when first needed

            await eventually(closed, 30, "descriptors come back")
            assert gateway.rss() - memory < 40 * MIB

    run(work, 240)


async def _vanished(gateway: Gateway, stack: AsyncExitStack) -> dict[str, bad.Wire]:
    """Connect a client of each protocol through a wire, and silence the wire."""
    wires: dict[str, bad.Wire] = {}
    for name in ("native", "lerobot", "openpi", "http"):
        wires[name] = wire = bad.Wire(f"127.0.0.1:{gateway.ports[name]}")
        where = await stack.enter_async_context(bad.tcp_server(wire.talk))
        if name in ("native", "lerobot"):
            channel = grpc.aio.insecure_channel(where)
            await stack.enter_async_context(channel)
            if name == "native":
                await channel.unary_unary(INFER)(message("m"), timeout=SERVED_S)
            else:
                await channel.unary_unary("/transport.AsyncInference/Ready")(b"", timeout=SERVED_S)
        elif name == "openpi":
            client = await connect(f"ws://{where}", compression=None, close_timeout=0.1)
            stack.push_async_callback(_abort, client)
            await client.recv()
        else:
            reader, writer = await asyncio.open_connection(*where.split(":"))
            stack.callback(writer.close)  # till then it stays
            writer.write(IDLE["http"])
            assert await reader.read(10)
        wire.deaf = True
    return wires


async def _abort(client: Any) -> None:
    client.transport.abort()


def test_200_idle_connections_at_every_listener() -> None:
    """1,400 in all: every protocol is served beside them, and they cost <= 60 MiB."""

    async def work() -> None:
        model = Model(3)
        gateway = Gateway([model.endpoint], protocols=PORTS)
        async with running(model, gateway):
            await ask_all(gateway)
            before, memory = gateway.descriptors(), gateway.rss()
            held = []
            for name, opening in IDLE.items():
                for _ in range(200):
                    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.ports[name])
                    writer.write(opening)
                    held.append((reader, writer))
                assert await asyncio.wait_for(reader.read(1), SERVED_S)  # the last one is greeted
            slowest = await ask_all(gateway)
            grown = gateway.rss() - memory
            print(f"{len(held)} idle: {grown / MIB:.1f} MiB, slowest exchange {slowest:.2f} s")
            # Some that count as "before" have left meanwhile.
            assert gateway.descriptors() >= before + len(held) - 20
            assert grown < 60 * MIB
            for _, writer in held:
                writer.transport.abort()

            async def closed() -> bool:
                return gateway.descriptors() <= before + 5

            await eventually(closed, 20, "descriptors come back")
            await ask_all(gateway)

    run(work)
