"""Entry point `phyai`: quick answers first, then the typer app; how a command line ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from phyai.cli import console


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    try:
        code = 0 if _quick(arguments) else _typer(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as done:
        if isinstance(done.__context__, BrokenPipeError):  # rich and click end it with code 1
            _drop_stdout()
            return console.BROKEN_PIPE
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    except BaseException as error:
        if isinstance(error, BrokenPipeError):
            _drop_stdout()
        return console.report(error, debug=debug)


def _quick(arguments: list[str]) -> bool:
    """Answer `phyai plugins` without typer, whose option types cost more than the answer."""
    if arguments[:1] != ["plugins"] or not set(arguments[1:]) <= {"--json", "--debug"}:
        return False
    from phyai.cli import plugin_list

    plugin_list.show(json="--json" in arguments)
    return True


def _typer(arguments: list[str]) -> int:
    from phyai.cli import commands

    return commands.run(arguments)


def _drop_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush finds no closed pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # a captured stdout has no descriptor
        return
