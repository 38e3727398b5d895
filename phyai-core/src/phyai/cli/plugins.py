"""`phyai plugins`: what is installed, what is broken and why. Imports no torch."""

from __future__ import annotations

from phyai.cli import plugin_list
from phyai.cli.options import DebugOption, JsonOption


def plugins(json: JsonOption = False, debug: DebugOption = False) -> None:
    """List installed adapter and hook plugins with their status; broken ones don't hide others."""
    plugin_list.show(json=json)
