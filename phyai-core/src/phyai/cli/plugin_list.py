"""The list behind `phyai plugins`: what is installed, what is broken. No torch, no typer."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from phyai.cli import console


def show(*, json: bool) -> None:
    """Print every plugin; broken ones do not hide the others."""
    from phyai import plugins as found

    adapters, hooks = found.inspect_all(), found.inspect_hooks()
    unmatched = found.unmatched()
    if json:
        console.print_json({"plugins": adapters, "hooks": hooks, "unmatched": unmatched})
        return
    if not adapters:
        print("No plugin is installed. Install a model package, such as phyai-models-NAME.")
    for title, records in (("plugins", adapters), ("hook plugins", hooks)):
        if records:
            print("\n".join(_lines(title, records)))
    for line in [*problems([*adapters, *hooks]), *unmatched]:
        print(line, file=sys.stderr)


def problems(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one line per plugin that is broken or offered twice."""
    lines: list[str] = []
    told: set[str] = set()
    for record in records:
        if record["status"] not in ("ok", "blocked"):
            lines.append(f"{record['id']} of {record['dist']}: {record['error']}")
        others = record.get("conflicts_with")
        if others and record["status"] != "blocked" and record["id"] not in told:
            told.add(record["id"])
            choices = [f"{dist}:{record['id']}" for dist in (record["dist"], *others)]
            lines.append(
                f"{record['id']} is offered by {' and '.join((record['dist'], *others))}; "
                f"choose {' or '.join(choices)}."
            )
    if any(record["traceback"] for record in records):
        lines.append("Tracebacks: phyai plugins --json")
    return lines


def _lines(title: str, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table as text; rich would cost a quarter of the time this command may take."""
    keys = ("id", "status", "dist", "version")
    rows: list[tuple[str, ...]] = [("id", "status", "package", "version")]
    rows += [tuple(str(record[key]) for key in keys) for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = sum(widths) + 2 * len(widths)
    width = max(shutil.get_terminal_size((100, 24)).columns - indent, 30)
    texts = ["summary", *map(_summary, records)]
    yield title
    for row, text in zip(rows, texts, strict=True):
        cells = "".join(cell.ljust(size + 2) for cell, size in zip(row, widths, strict=True))
        first, *rest = textwrap.wrap(text, width) or [""]
        yield (cells + first).rstrip()
        yield from (" " * indent + line for line in rest)
    yield ""


def _summary(record: Mapping[str, Any]) -> str:
    manifest = record["manifest"]
    return str(manifest["summary"] if manifest else record["error"] or record["value"])
