"""pi0: adapter, arguments and requests (imported lazily; the plugin module is torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.models.pi0.main_pi0 import PI0Adapter, PI0Args, PI0Config, PI0Request

__all__ = ["PI0Adapter", "PI0Args", "PI0Config", "PI0Request"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phyai.models.pi0 import main_pi0

    return getattr(main_pi0, name)
