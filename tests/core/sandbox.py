"""Throw-away distributions for core's tests, by folder; see ``phyai.testing.sandbox``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phyai.testing import sandbox
from phyai.testing.sandbox import MODEL, PLUGIN, Sandbox, make_distribution, run_python

__all__ = [
    "DUE",
    "MODEL",
    "PLUGIN",
    "STATUS",
    "ask",
    "error_of",
    "install",
    "install_hooks",
    "make_distribution",
    "run_python",
    "source",
]

STATUS = """
from phyai import plugins
rows = plugins.inspect_all()
result = {row["id"]: [row["status"], row["error"]] for row in rows}
"""

DUE = "from phyai.hooks import hookimpl\n"


def ask(folder: Path, code: str, **env: str) -> Any:
    return Sandbox(folder).ask(code, **env)


def error_of(folder: Path, statement: str, **env: str) -> dict[str, Any]:
    error: dict[str, Any] = Sandbox(folder).error_of(statement, **env)
    return error


def source(plugin_id: str, package: str, more: str = "") -> str:
    return sandbox.plugin_source(plugin_id, package, more)


def install(folder: Path, plugin_id: str, code: str | None = None, **options: Any) -> None:
    Sandbox(folder).adapter(plugin_id, code, **options)


def install_hooks(folder: Path, name: str, code: str, **options: Any) -> None:
    Sandbox(folder).hooks(name, code, **options)
