"""GR00T N1.7: adapter, arguments and request (imported lazily; the plugin module is torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.models.gr00t.main_gr00t import GrootAdapter, GrootArgs, GrootConfig, GrootRequest

__all__ = ["GrootAdapter", "GrootArgs", "GrootConfig", "GrootRequest"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phyai.models.gr00t import main_gr00t

    return getattr(main_gr00t, name)
