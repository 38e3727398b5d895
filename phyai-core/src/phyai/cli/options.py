"""Options that several commands have; `main` itself looks for --debug."""

from __future__ import annotations

from typing import Annotated

import typer

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")
]
