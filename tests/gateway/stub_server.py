"""A model server over a stub engine, as a process: prints its port, ends on its input's end."""

from __future__ import annotations

import asyncio
import sys

from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.native import NativeListener
from tests.gateway.stub_world import StubBackend, world


async def main() -> None:
    async with world() as w:
        stub = await w.add(StubBackend(float(sys.argv[1])))
        stub.delay_s = float(sys.argv[2])
        listener = NativeListener(w.gateway.router, ListenerOptions())
        print(await listener.start(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await listener.stop()


asyncio.run(main())
