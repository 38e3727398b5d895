"""Every hook a plugin may implement: names, arguments, what to return. Imports no torch.

A plugin marks plain functions with ``@hookimpl`` and declares the arguments it wants, by name.
Part hooks run at set-up: a plain implementation **replaces** the part (return None to leave it
alone), a ``@hookimpl(wrapper=True)`` generator **wraps** it: ``inner = yield; return Mine(inner)``.
A wrapper keeps the wrapped part in attribute ``inner``: core looks there for optional methods
(``prepare_grid``, ``plan``) and for ``capture_safe = False``. Reference: docs/reference/hooks.md.
Order: ``tryfirst``, then the rest, then ``trylast``; by plugin name among equals. The first
wrapper is the outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from phyai.manifest import AdapterManifest, Preset

if TYPE_CHECKING:
    from phyai.types import (
        ActionChunk,
        CacheSpec,
        Conditioning,
        Denoiser,
        Output,
        Solver,
    )

__all__ = ["AdapterManifest", "Preset", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker("phyai")
hookimpl = pluggy.HookimplMarker("phyai")


@hookspec
def phyai_adapter() -> AdapterManifest:  # type: ignore[empty-body]
    """Return the manifest of this plugin module's adapter (group ``phyai.plugins`` only)."""


@hookspec(firstresult=True)
def phyai_conditioning(adapter: Any, services: Any) -> Conditioning | None:
    """Return the part that encodes a request's inputs into the cache."""


@hookspec(firstresult=True)
def phyai_cache(adapter: Any, services: Any) -> CacheSpec | None:
    """Return the CacheSpec; a wrapper of any part that needs memory adds its buffers here.

    Name buffers after the plugin; a wrapper whose buffers are written in the solver loop declares
    them with ``scratch=True``.
    """


@hookspec(firstresult=True)
def phyai_solver(adapter: Any, services: Any) -> Solver | None:
    """Return the solver of ordinary requests."""


@hookspec(firstresult=True)
def phyai_rollout_solver(adapter: Any, services: Any) -> Solver | None:
    """Return the solver of rollout requests (RL); a wrapper gets None where there is none.

    Bound and checked at start; no request of this version is a rollout.
    """


@hookspec(firstresult=True)
def phyai_output(adapter: Any, services: Any) -> Output | None:
    """Return the part that turns the solver variable into results."""


@hookspec(firstresult=True)
def phyai_denoiser(adapter: Any, services: Any, stage: str, inner: Denoiser) -> Denoiser | None:
    """Return a denoiser around or instead of ``inner``.

    stage: ``network`` (inside guidance, once per branch) or ``prediction`` (outside guidance). The
    prediction is bound once at start, as a check, and again for each key.
    """


@hookspec
def phyai_validate_action(chunk: ActionChunk, adapter: Any) -> str | None:
    """Return what is wrong with ``chunk``, or None; a text or an exception blocks the chunk.

    The arrays of ``chunk`` are read-only; to change actions wrap the output instead. Model requests
    are in model space and are not shown to validators.
    """


@hookspec
def phyai_kernels() -> Sequence[Any] | None:
    """Return KernelRows to add to the table of operations at set-up."""


@hookspec
def phyai_commands() -> Mapping[str, Callable[..., Any]] | None:
    """Return CLI commands by name: functions or typer apps (group ``phyai.hooks`` only)."""


@hookspec
def phyai_engine_ready(info: Any) -> None:
    """Observe that the engine can take requests."""


@hookspec
def phyai_request_started(info: Any) -> None:
    """Observe the start of a request."""


@hookspec
def phyai_request_finished(info: Any) -> None:
    """Observe the end of a request, good or bad."""


@hookspec
def phyai_engine_closing(info: Any) -> None:
    """Observe that the engine is about to close."""
