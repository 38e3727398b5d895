"""``phyai serve`` and its alias ``phyai server``. Importing it loads neither torch nor grpc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.hooks import hookimpl


@hookimpl
def phyai_commands() -> Mapping[str, Callable[..., Any]]:
    return {"serve": serve, "server": serve}


def serve(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="What to serve, and where.")],
    check: Annotated[
        bool, typer.Option("--check", help="Check the file and what it names, load nothing.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key. May be repeated."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="Serve a built-in preset, to try it out."),
    ] = None,
    insecure_bind: Annotated[
        bool,
        typer.Option("--insecure-bind", help="Allow addresses that strangers can reach."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve one model to robots and gateways.

    The file holds the engine's keys (plugin, plugin_args, config, deployment) and `server:`, with
    model_name, host, port and limits. SIGTERM answers what was accepted, then stops.
    """
    from phyai.cli import console

    overrides = [*(settings or ()), *(["server.insecure_bind=true"] if insecure_bind else ())]
    with console.Waiting("importing torch"):
        from phyai_gateway.server import config, running

        loaded = config.load(file, tuple(overrides), preset)
    if check:
        running.check(loaded)
        typer.echo(f"Configuration valid: {file}")
        return
    raise typer.Exit(running.run(loaded))
