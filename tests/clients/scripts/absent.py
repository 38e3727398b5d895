"""Stand-ins for packages that lerobot's client imports on its way and never uses."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

NAMES = ("accelerate", "av", "datasets", "diffusers", "pandas", "pyarrow", "torchvision")


class _Anything(type):
    """A class whose attributes and results are others of its kind; modules may derive from it."""

    def __getattr__(cls, name: str) -> Any:
        return _named(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _Anything("made", (), {})


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _named(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in NAMES:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install() -> None:
    """Let those imports succeed where the package is missing."""
    sys.meta_path.append(_Finder())
