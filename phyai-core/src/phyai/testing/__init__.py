"""What adapter authors and the test-suite use to check a plugin. Importing this imports no torch.

``AdapterConformance`` is the class an author subclasses; ``python -m phyai.testing ID`` runs the
same checks without one.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phyai.testing.suite import AdapterConformance

__all__ = ["AdapterConformance"]


def __getattr__(name: str) -> object:
    # Lazy: pytest imports this package for its plugin, before a project has configured torch.
    if name == "AdapterConformance":
        return import_module("phyai.testing.suite").AdapterConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
