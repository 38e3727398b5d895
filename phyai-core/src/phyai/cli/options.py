"""Options that several commands have; `main` itself looks for --debug."""

from __future__ import annotations

from typing import Annotated

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
