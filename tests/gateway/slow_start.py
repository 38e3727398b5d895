"""A server whose engine never finishes loading, for a test to interrupt; imports no torch."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from phyai_gateway.server.config import ObservationOptions, ServerConfig, ServerOptions
from phyai_gateway.server.model_server import ModelServer, print_line, serve


def main() -> int:
    unused: Any = None
    options = ServerOptions("slow", port=0, http_port=0)
    config = ServerConfig(Path("slow.yaml"), unused, None, options, ObservationOptions())

    def load(config: Any) -> Any:
        assert "torch" not in sys.modules
        print("loading begins", file=sys.stderr, flush=True)
        time.sleep(600)

    async def run() -> int:
        return await serve(ModelServer(config, load), announce=print_line)

    return asyncio.run(run())
