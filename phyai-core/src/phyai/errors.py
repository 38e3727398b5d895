"""Every error PhyAI raises on purpose.

PhyaiError
├── ConfigError (ValueError)            a setting, file or topology that cannot work
├── MissingDependency (ImportError)     an optional package is not installed; names the extra
├── PluginError                         discovery or binding of a plugin
│   ├── PluginNotFound (ValueError)     no such plugin id
│   └── PluginContractError             the plugin breaks a rule of the contract
├── CheckpointError                     a checkpoint that cannot be loaded as it is
│   ├── CheckpointNotFound              no such folder, file or hub repository
│   ├── MissingTensors                  required tensors are absent
│   ├── UnexpectedTensors               tensors nobody asked for
│   └── ShapeMismatch                   a tensor of another shape than the model's
├── RequestError (ValueError)           one bad request; the engine goes on
│   └── SessionLost                     the session's state is gone; start a new one
│       ├── SessionUnknown          no such session here, or lost too long ago to say how
│       ├── SessionEvicted          it made room for others
│       ├── SessionExpired          no request came within its time to live
│       ├── SessionClosed           it was closed
│       └── SessionReplicaDied      the replica that had it died
├── CapacityError                       a limit of memory or of a pool
│   └── StaticCacheError                a static cache is full
├── EngineUnavailableError (RuntimeError)  closed, starting, dead or poisoned; see ``.reason``
├── ActionRejected                      a computed action was blocked before it left
├── WeightUpdateError (RuntimeError)    an online weight update went wrong
├── CommTimeoutError (RuntimeError)     ranks of a replica did not arrive at a collective
├── NoBackendError (RuntimeError)       torch lacks the collectives a topology needs
├── KernelUnavailable                   no implementation of an op fits the facts
└── CudaGraphError (RuntimeError)       misuse of a captured graph

Message form: ``<thing> <rule>; got <value>. <what to do>.``
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

UnavailableReason = Literal["closed", "starting", "worker_died", "wrong_mode", "poisoned"]


class PhyaiError(Exception):
    """Base of all PhyAI errors."""


class ConfigError(PhyaiError, ValueError):
    """A setting, file or topology that cannot work."""


class MissingDependency(PhyaiError, ImportError):
    """An optional package is not installed; the message names what to install."""


class PluginError(PhyaiError):
    """Discovery or binding of a plugin failed."""


class PluginNotFound(PluginError, ValueError):
    """No installed plugin has this id."""


class PluginContractError(PluginError):
    """A plugin breaks a rule of the adapter or hook contract."""


class CheckpointError(PhyaiError):
    """A checkpoint that cannot be loaded as it is."""


class CheckpointNotFound(CheckpointError):
    """No such folder, file or hub repository."""


class MissingTensors(CheckpointError):
    """Required tensors are absent from the checkpoint."""


class UnexpectedTensors(CheckpointError):
    """The checkpoint holds tensors that no parameter claims."""


class ShapeMismatch(CheckpointError):
    """A tensor's shape differs from its parameter's."""


class RequestError(PhyaiError, ValueError):
    """One request is invalid; nothing was computed and the next request works."""


class SessionLost(RequestError):
    """The session's row is gone; ``seq`` 0 opens it anew. See its five subclasses.

    How a session was lost is remembered for the last 1024 of them. After that the same request
    is a SessionUnknown, as it is on a replica that never had the session.
    """


class SessionUnknown(SessionLost):
    """No such session: never opened here, or lost so long ago that nobody knows how."""


class SessionEvicted(SessionLost):
    """The session was the least recently used one when another needed its place."""


class SessionExpired(SessionLost):
    """The session had no request within ``runtime.session_ttl_s``."""


class SessionClosed(SessionLost):
    """The session was closed by ``Engine.close_session``."""


class SessionReplicaDied(SessionLost):
    """The process that had the session died."""


class CapacityError(PhyaiError):
    """A limit of memory or of a pool was reached."""


class StaticCacheError(CapacityError):
    """A static cache has no room left."""


class EngineUnavailableError(PhyaiError, RuntimeError):
    """The engine cannot take requests; ``reason`` says why."""

    def __init__(self, message: str, *, reason: UnavailableReason) -> None:
        super().__init__(message)
        self.reason: UnavailableReason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_unavailable, (self.args[0], self.reason))


def _rebuild_unavailable(message: str, reason: UnavailableReason) -> EngineUnavailableError:
    return EngineUnavailableError(message, reason=reason)


class ActionRejected(PhyaiError):
    """A computed action was non-finite or blocked by a validator, and did not leave.

    validator: who blocked it; None for core's own checks.
    """

    def __init__(self, message: str = "", *, validator: str | None = None) -> None:
        super().__init__(message)
        self.validator = validator


class WeightUpdateError(PhyaiError, RuntimeError):
    """An online weight update was misused or failed."""


class CommTimeoutError(PhyaiError, RuntimeError):
    """Ranks of a replica did not arrive at a collective; ``ranks`` says which, as far as known.

    The replica must be started anew: its ranks no longer agree on where they are.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_timeout, (self.args[0], self.ranks))


def _rebuild_timeout(message: str, ranks: tuple[int, ...]) -> CommTimeoutError:
    return CommTimeoutError(message, ranks=ranks)


class NoBackendError(PhyaiError, RuntimeError):
    """torch was built without the collectives a topology needs."""


class KernelUnavailable(PhyaiError):
    """No implementation of an op fits the device, dtype and shape."""


class CudaGraphError(PhyaiError, RuntimeError):
    """A captured graph was misused (replay before capture, wrong shape, ...)."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""
