"""What ``phyai serve`` does with a checked file: look at everything it names, or run it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from pathlib import Path

from phyai import plugins
from phyai.cli.console import Waiting
from phyai.engine_builder import looks_like_path
from phyai.errors import ConfigError
from phyai_gateway.server.config import ServerConfig, TensorOptions
from phyai_gateway.server.listening import (
    risks,
    tls_files,
    token_store,
    wanted_listeners,
)
from phyai_gateway.server.model_server import THREAD, ModelServer, print_line, serve
from phyai_gateway.server.registering import announcement

_PATH_ARGS = ("checkpoint_dir", "checkpoint", "tokenizer", "processor_dir", "norm_stats")


def check(config: ServerConfig) -> None:
    """Raise ConfigError unless what the file names is there: adapter, files, protocols, keys."""
    plugins.find(config.args.plugin).load_class()
    for name in _PATH_ARGS:
        value = getattr(config.args.plugin_args, name, None)
        text = str(value) if isinstance(value, str | Path) else ""
        if looks_like_path(text) and not Path(text).exists():
            raise ConfigError(f"plugin_args.{name} must exist; got {text!r}.")
    if isinstance(config.adapter, TensorOptions):
        from phyai_gateway.server.tensor_backend import request_type

        request_type(config.adapter.request_type)
    tls_files(config.server)
    token_store(config.server)
    announcement(config.server)
    for line in risks(config.server, wanted_listeners(config.server)):
        print_line(f"note: {line}")


def run(config: ServerConfig) -> int:
    """Serve until a signal; return the exit code."""
    from phyai_gateway.server import engine_host

    logging.getLogger("phyai").setLevel(logging.INFO)

    def load(wanted: ServerConfig) -> engine_host.EngineHost:
        with Waiting("loading weights") as progress:
            return engine_host.load(wanted, progress)

    async def main() -> int:
        return await serve(ModelServer(config, load), announce=print_line)

    code = asyncio.run(main())
    if any(thread.name == THREAD for thread in threading.enumerate()):
        # It is inside a native call that knows no interruption; ending Python under it may crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
