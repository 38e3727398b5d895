"""Options that several commands have; `main` itself looks for --debug."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

MANY = "May be repeated."


def _plugin_ids(incomplete: str) -> list[str]:
    from phyai.plugins import registered

    return [name for name in registered() if name.startswith(incomplete)]


DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, all else on stderr.")
]

# ---------------------------------------------------------------- which engine

PluginOption = Annotated[
    str | None,
    typer.Option(
        "--plugin",
        metavar="PLUGIN",
        autocompletion=_plugin_ids,
        help="Plugin id, see `phyai plugins`. Default: the one that recognises --checkpoint.",
    ),
]
PresetOption = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME", help="Built-in preset. Default: the first one."),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", metavar="DIR_OR_HUB_ID", help="Your own checkpoint."),
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a hub checkpoint.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="Precision: fp32, bf16, or the plugin's."),
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda[:N]", help="Where to run.")
]
TokenizerOption = Annotated[
    str | None, typer.Option("--tokenizer", metavar="PATH", help="Tokenizer file or folder.")
]
ArgOption = Annotated[
    list[str] | None,
    typer.Option("--arg", metavar="KEY=VALUE", help=f"Any argument of the adapter. {MANY}"),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=f"Engine setting, see `phyai config --fields`. {MANY}",
    ),
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options that choose and configure an engine."""

    plugin: str | None = None
    preset: str | None = None
    checkpoint: str | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str = "auto"
    tokenizer: str | None = None
    args: Sequence[str] = ()
    settings: Sequence[str] = ()


# Parameter of the command line, the field of RunOptions it fills, its option.
_ENGINE: tuple[tuple[str, str, Any], ...] = (
    ("plugin", "plugin", PluginOption),
    ("preset", "preset", PresetOption),
    ("checkpoint", "checkpoint", CheckpointOption),
    ("revision", "revision", RevisionOption),
    ("dtype", "dtype", DtypeOption),
    ("device", "device", DeviceOption),
    ("tokenizer", "tokenizer", TokenizerOption),
    ("arg", "args", ArgOption),
    ("set_", "settings", SetOption),
)


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose an engine, in the place of its parameter ``wanted``.

    The command gets them together as a RunOptions.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name != "wanted":
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        for option, _, annotation in _ENGINE:
            default = "auto" if option == "device" else None
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(
                inspect.Parameter(option, kind, default=default, annotation=annotation)
            )

    @functools.wraps(command)
    def with_engine(**values: Any) -> None:
        given = {field: values.pop(option) for option, field, _ in _ENGINE}
        command(wanted=RunOptions(**{k: v for k, v in given.items() if v is not None}), **values)

    # What typer reads instead of the command's own.
    with_engine.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_engine.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_engine
