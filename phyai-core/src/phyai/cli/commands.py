"""The typer app: the commands of core, built when asked for, and those of hook plugins."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from phyai.cli import console
from phyai.cli.options import DebugOption
from phyai.cli.quick_scan import may_have_hooks

SUMMARY = "Run vision-language-action models: plugins, checkpoints, presets, and what they cost."
COMMANDS = {
    "run": ("phyai.cli.run:run", "Run a plugin once and print its actions."),
    "plugins": ("phyai.cli.plugins:plugins", "List the installed plugins and what is wrong."),
    "doctor": ("phyai.cli.doctor:doctor", "Show what this machine offers and what is missing."),
    "config": ("phyai.cli.config:config", "Print, explain or check an engine configuration."),
    "bench": ("phyai.cli.bench:bench", "Time the stages of requests of many sizes."),
    "profile": ("phyai.cli.profile:profile", "Show operations, bytes and time of each stage."),
    "roofline": ("phyai.cli.roofline:roofline", "Tell what bounds a control loop, or a machine."),
    "verify": ("phyai.cli.verify:verify", "Compare a plugin with the cases of a golden folder."),
    "new-adapter": ("phyai.cli.new_adapter:new_adapter", "Write a package with a model of yours."),
    "new-hook": ("phyai.cli.new_hook:new_hook", "Write a package that changes one part."),
}
ELSEWHERE = {"serve": "phyai-gateway", "server": "phyai-gateway"}


class Commands(TyperGroup):
    """Builds a command when it is asked for: core's own first, then those of hook plugins."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *_plugin_commands()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            path, summary = COMMANDS[cmd_name]
            return _build(cmd_name, _load(path), short_help=summary)
        offered = _plugin_commands()
        if cmd_name in offered:
            return offered[cmd_name]
        if cmd_name in ELSEWHERE:
            return _build(cmd_name, _elsewhere(cmd_name), hidden=True, **_ANY_ARGUMENTS)
        return None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of --help without importing core's commands: it answers at once."""
        rows = [(name, summary) for name, (_, summary) in COMMANDS.items()]
        for name, command in _plugin_commands().items():
            rows.append((name, command.get_short_help_str(limit=80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


_ANY_ARGUMENTS: dict[str, Any] = {
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
}


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _build(name: str, target: Any, **settings: Any) -> Any:
    """Return the command of a function or a typer app."""
    if isinstance(target, typer.Typer):
        command = typer.main.get_command(target)
    else:
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(name, **settings)(target)
        command = typer.main.get_command(single)
    command.name = name
    return command


@functools.cache
def _plugin_commands() -> dict[str, Any]:
    """Return the commands of hook plugins; what is left out is said on stderr, once."""
    if not may_have_hooks():
        return {}
    from phyai.plugins import hook_commands

    offered, problems = hook_commands()
    for name in [name for name in offered if name in COMMANDS]:
        del offered[name]
        problems.append(f"command {name!r} of a hook plugin is one of core's own")
    built: dict[str, Any] = {}
    for name, target in offered.items():
        try:
            built[name] = _build(name, target)
            built[name].get_short_help_str()
        except (Exception, SystemExit) as error:
            built.pop(name, None)
            what = f"{type(error).__name__}: {error}"
            problems.append(f"command {name!r} of a hook plugin cannot be built: {what}")
    for problem in problems:
        print(f"note: {problem}", file=sys.stderr)
    return built


def _elsewhere(name: str) -> Callable[[], None]:
    def command() -> None:
        from phyai.errors import MissingDependency

        package = ELSEWHERE[name]
        raise MissingDependency(
            f"command {name!r} needs the package {package}; got an environment without it. "
            f"Install it with `pip install {package}`."
        )

    return command


class _Once:
    """Lets a log line through once; verify opens many engines of one checkpoint."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def filter(self, line: Any) -> bool:
        text = line.getMessage()
        new = text not in self._said
        self._said.add(text)
        return new


app = typer.Typer(
    cls=Commands,
    help=SUMMARY,
    no_args_is_help=False,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(value: bool) -> None:
    if value:
        from phyai import __version__

        print(f"phyai {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
    debug: DebugOption = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        return
    import logging

    log, handler = logging.getLogger("phyai"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(_Once())
    log.addHandler(handler)
    context.call_on_close(lambda: log.removeHandler(handler))


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code; its errors come out."""
    _plugin_commands.cache_clear()
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="phyai", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == console.INTERRUPTED:
        print("Interrupted.", file=sys.stderr)
    return code if isinstance(code, int) else 0
