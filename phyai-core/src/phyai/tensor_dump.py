"""Tensor dump: the outputs of a model's leaf modules, one file per request."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from phyai.engine_config import RuntimeConfig
from phyai.errors import ConfigError

log = logging.getLogger("phyai")

Wanted = Callable[[str, nn.Module], bool]
"""Module name and module -> whether its outputs are written."""


class TensorDumper:
    """Hooks the leaf modules of a model and writes what they return, request by request.

    Files: ``<folder>/rank<R>_pid<P>/pass<NNNNN>.pt``, read by ``load_pass``. Keys:
    ``<root>.<module path>``, ``::call1`` and so on for repeated calls of one module, and behind
    that the name or index (``.0``) within an output of several tensors.

    >>> import tempfile
    >>> import torch
    >>> from phyai.tensor_dump import TensorDumper, load_pass
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> dumper = TensorDumper({"net": model}, tempfile.mkdtemp())
    >>> with dumper.step():
    ...     _ = model(torch.zeros(1, 2))
    >>> sorted(load_pass(dumper.folder / "pass00000.pt"))
    ['net.0', 'net.1']
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        folder: str | Path,
        wanted: Wanted = lambda name, module: True,
        *,
        rank: int = 0,
    ) -> None:
        leaves = {
            f"{root}.{path}" if path else root: module
            for root, top in roots.items()
            for path, module in top.named_modules()
            if not any(True for _ in module.children())
        }
        chosen = {name: module for name, module in leaves.items() if _asked(wanted, name, module)}
        if not chosen:
            few = ", ".join(sorted(leaves)[:3]) or "none at all"
            raise ConfigError(
                f"the tensor dump must have a module to write; none of {len(leaves)} passes the "
                f"filter. Names look like: {few}. Correct debug_tensor_dump_filter."
            )
        self.folder = Path(folder) / f"rank{rank}_pid{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".writable").touch()
            (self.folder / ".writable").unlink()
        except OSError as error:
            raise ConfigError(
                f"runtime.debug_tensor_dump_dir must be a folder that can be written; got "
                f"{str(folder)!r}: {error.strerror}. Choose another one."
            ) from error
        self.passes = 0
        self._tensors: dict[str, Tensor] | None = None
        self._calls: dict[str, int] = {}
        self._hooks = [
            module.register_forward_hook(functools.partial(self._keep, name))
            for name, module in chosen.items()
        ]
        log.info("tensor dump: outputs of %d modules go to %s", len(chosen), self.folder)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Collect what the modules return inside, and write it, also when an error ends it."""
        self._tensors, self._calls = {}, {}
        try:
            yield
        finally:
            tensors, self._tensors = self._tensors, None
            self._write(tensors)

    def close(self) -> None:
        """Remove the hooks; the files stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._tensors is None:
            return
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        for part, tensor in _parts(output):
            key = f"{name}::call{number}{part}" if number else f"{name}{part}"
            self._tensors[key] = tensor.detach().to("cpu", copy=True)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        path = self.folder / f"pass{self.passes:05d}.pt"
        self.passes += 1
        try:
            torch.save(tensors, path)
        except (OSError, RuntimeError) as error:  # the request itself went well
            log.error("tensor dump %s could not be written: %s", path, error)


def open_dumper(roots: Mapping[str, nn.Module], runtime: RuntimeConfig) -> TensorDumper | None:
    """Return the dumper that a config asks for; None when it asks for none.

    Raises: ConfigError for a folder that cannot be written, a filter function that cannot be
    imported, and a model that has no module for it.
    """
    if runtime.debug_tensor_dump_dir is None:
        return None
    if not roots:
        raise ConfigError(
            "runtime.debug_tensor_dump_dir needs an adapter that names its modules in "
            "dump_targets(); got none. Leave it out."
        )
    return TensorDumper(roots, runtime.debug_tensor_dump_dir, _wanted(runtime))


def load_pass(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of one file; nothing but tensors is ever unpickled.

    Raises: ConfigError when the file is no pass of a tensor dump.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # the reader raises whatever the bytes lead to
        raise _no_pass(path, type(error).__name__) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise _no_pass(path, type(found).__name__)
    return found


def _no_pass(path: str | Path, what: str) -> ConfigError:
    return ConfigError(
        f"file {str(path)!r} must be a pass of a tensor dump, tensors by name; got {what}. "
        "Choose a pass*.pt file."
    )


def _wanted(runtime: RuntimeConfig) -> Wanted:
    """Return the filter of a config: any regex found in the name, or the user's function."""
    if runtime.debug_tensor_dump_filter_fn is not None:
        return _function(runtime.debug_tensor_dump_filter_fn)
    if runtime.debug_tensor_dump_filter is None:
        return lambda name, module: True
    patterns = [re.compile(pattern) for pattern in runtime.debug_tensor_dump_filter]
    return lambda name, module: any(pattern.search(name) for pattern in patterns)


def _function(text: str) -> Wanted:
    """Return ``pkg.mod:func`` or ``/path/file.py:func``."""
    place, _, name = text.rpartition(":")
    try:
        function = getattr(_module(place), name)
    except Exception as error:  # the user's file may raise anything
        raise ConfigError(
            f"runtime.debug_tensor_dump_filter_fn must name a function that can be imported; got "
            f"{text!r}: {type(error).__name__}: {error}. Correct the path or the file."
        ) from error
    if not callable(function):
        raise ConfigError(
            f"runtime.debug_tensor_dump_filter_fn must name a function; got {text!r}, which is "
            f"{type(function).__name__}. Name one that takes (name, module)."
        )
    wanted: Wanted = function
    return wanted


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:
        raise ImportError("no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _asked(wanted: Wanted, name: str, module: nn.Module) -> bool:
    try:
        return bool(wanted(name, module))
    except Exception as error:
        raise ConfigError(
            f"the function of runtime.debug_tensor_dump_filter_fn must take (name, module); got "
            f"{type(error).__name__} for {name!r}: {error}. Correct it."
        ) from error


def _parts(output: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's output with where they are in it."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for name, value in output.items():
            yield from _parts(value, f"{path}.{name}")
    elif isinstance(output, tuple | list):
        for index, value in enumerate(output):
            yield from _parts(value, f"{path}.{index}")
