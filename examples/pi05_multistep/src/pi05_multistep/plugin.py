"""Hook plugin: gives pi0.5 a second-order solver, no other adapter. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from phyai.hooks import hookimpl

if TYPE_CHECKING:
    from phyai.types import Solver


@hookimpl
def phyai_solver(adapter: Any, services: Any) -> Solver | None:
    if adapter.name != "pi05":
        return None
    from pi05_multistep.solver import AdamsBashforth2

    return AdamsBashforth2()
