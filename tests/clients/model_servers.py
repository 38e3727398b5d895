"""Model servers as a process: prints their ports, and ends when its input does."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack

from phyai_gateway.server import config, engine_host
from phyai_gateway.server.model_server import ModelServer
from tests.clients import models


async def main() -> None:
    models.register()
    async with AsyncExitStack() as stack:
        ports = {}
        for file in sys.argv[1:]:
            loaded = config.load(file)
            server = ModelServer(loaded, lambda c: engine_host.load(c, lambda *_: None))
            stack.push_async_callback(server.stop)
            await server.start()
            ports[loaded.server.model_name] = dict(server.ports)
        print(json.dumps(ports), flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
