"""`phyai plugins`: what is installed, what is broken and why. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from phyai.cli import console
from phyai.cli.console import DebugOption, JsonOption

STYLES = {"ok": "green", "blocked": "yellow"}


def plugins(json: JsonOption = False, debug: DebugOption = False) -> None:
    """List installed adapter and hook plugins with their status; broken ones don't hide others."""
    from phyai import plugins as found

    adapters, hooks = found.inspect_all(), found.inspect_hooks()
    if json:
        console.print_json({"plugins": adapters, "hooks": hooks})
        return
    screen = console.console()
    if adapters:
        screen.print(_table("plugins", adapters))
    else:
        print("No plugin is installed. Install a model package, such as phyai-models-NAME.")
    if hooks:
        screen.print(_table("hook plugins", hooks))
    for line in problems([*adapters, *hooks]):
        print(line, file=sys.stderr)


def problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per plugin that is broken or offered twice."""
    lines = []
    for record in records:
        if record["status"] not in ("ok", "blocked"):
            lines.append(f"{record['id']} of {record['dist']}: {record['error']}")
        if others := record.get("conflicts_with"):
            lines.append(
                f"{record['id']} is offered by {record['dist']} and {', '.join(others)}; "
                f"choose {record['dist']}:{record['id']} or another."
            )
    if any(record["traceback"] for record in records):
        lines.append("Tracebacks: phyai plugins --json")
    return lines


def _table(title: str, records: Sequence[Mapping[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("id", "status", "package", "version"):
        table.add_column(column, no_wrap=True)
    table.add_column("summary", overflow="fold")
    for record in records:
        status = record["status"]
        manifest = record["manifest"]
        summary = manifest["summary"] if manifest else record["error"] or record["value"]
        table.add_row(
            record["id"],
            Text(status, style=STYLES.get(status, "red")),
            record["dist"],
            record["version"],
            Text(summary),
        )
    return table
