"""`phyai new-adapter`: a package with a model of your own, ready to run. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phyai.cli.options import DebugOption


def new_adapter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Plugin id, such as my-policy.")],
    kind: Annotated[
        str, typer.Option("--kind", metavar="vla|tracker", help="What it starts from.")
    ] = "vla",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="New folder. Default: ./NAME.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Write a package with an adapter that runs, its tests and CI; then change it into yours.

    vla: flow matching over camera, state and prompt.  tracker: one call from camera,
    prompt and what its session saw to waypoints.
    """
    from phyai import scaffold

    names = scaffold.Name.parse(name)
    folder = out or Path(names.dist)
    written = scaffold.write_adapter(names, kind, folder)
    print(f"{len(written)} files in {folder}. Next:")
    print(f"  cd {folder}")
    print("  pip install -e .")
    print(f"  phyai run --plugin {names.id}")
    print("  pytest")
