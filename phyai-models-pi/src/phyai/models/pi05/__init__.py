"""pi0.5: adapter, arguments and requests (imported lazily; the plugin module is torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.models.pi05.main_pi05 import PI05Adapter, PI05Args, PI05Config, PI05Request

__all__ = ["PI05Adapter", "PI05Args", "PI05Config", "PI05Request"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phyai.models.pi05 import main_pi05

    return getattr(main_pi05, name)
