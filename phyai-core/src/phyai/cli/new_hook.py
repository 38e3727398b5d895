"""`phyai new-hook`: a package that changes one part of other plugins. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phyai.cli.options import DebugOption


def new_hook(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Plugin name, such as arm-guard.")],
    hook: Annotated[
        str, typer.Option("--hook", metavar="HOOK", help="Hook, such as phyai_output.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="New folder. Default: ./NAME.")
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Write a package around one hook, with its tests and CI; it changes nothing yet."""
    from phyai import scaffold

    names = scaffold.Name.parse(name)
    folder = out or Path(names.dist)
    written = scaffold.write_hook(names, hook, folder)
    print(f"{len(written)} files in {folder}. Next:")
    print(f"  cd {folder}")
    print("  pip install -e .")
    print("  phyai plugins")
    print("  pytest")
