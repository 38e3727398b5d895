"""What travels between protocols, router and model server. Imports neither torch nor numpy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

Bytes: TypeAlias = bytes | bytearray | memoryview

ITEM_SIZES = {
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "bool": 1,
}
"""Bytes per element of each dtype, by name."""

Status = Literal[
    "invalid_argument",
    "unauthenticated",
    "permission_denied",
    "not_found",
    "failed_precondition",
    "unimplemented",
    "resource_exhausted",
    "unavailable",
    "deadline_exceeded",
    "cancelled",
    "data_loss",
    "internal",
]
"""Outcome of a request, named after gRPC's codes; each protocol has its own form of it."""


class Fault(Exception):
    """A refusal or failure that a client is told: what rule, what was got, what to do.

    retry_after: seconds after which another try makes sense; None = no hint. started: whether a
    model may have begun with the request, so that it must not be sent again. reason: a word for
    programs, such as ``session_evicted``.

    >>> Fault("not_found", "model must be one of pi05; got 'pi5'.").status
    'not_found'
    """

    def __init__(
        self,
        status: Status,
        message: str,
        *,
        retry_after: float | None = None,
        started: bool = False,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        self.retry_after, self.started, self.reason = retry_after, started, reason


def bare(fault: Fault) -> Fault:
    """Return the fault without where it came from, for who keeps it beyond its ``except``.

    Frames of the way hold the request's bytes: a fault that one of its own frames keeps would hold
    them until the garbage collector comes by, which after few but large requests is late.
    """
    fault.__traceback__ = fault.__context__ = fault.__cause__ = None
    return fault


@dataclass(frozen=True, slots=True)
class TensorData:
    """Elements in C order, little endian.

    >>> TensorData(bytes(8), (2,), "float32").nbytes
    8
    """

    data: Bytes
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise Fault(
                "invalid_argument",
                f"dtype must be one of {', '.join(ITEM_SIZES)}; got {self.dtype!r}.",
            )
        if len(self.shape) > 8 or any(size < 0 for size in self.shape):
            raise Fault(
                "invalid_argument", f"shape must be sizes of at most 8 dims; got {self.shape}."
            )
        wanted = prod(self.shape) * ITEM_SIZES[self.dtype]
        if self.nbytes != wanted:
            raise Fault(
                "invalid_argument",
                f"data of a {self.dtype} tensor {list(self.shape)} must have {wanted} bytes; got "
                f"{self.nbytes}.",
            )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


@dataclass(frozen=True, slots=True)
class ImageData:
    """One camera's picture. ``raw``: shape and layout say what the bytes are; else a whole file.

    shape: [H, W, C] or [B, H, W, C], or with layout ``chw`` [C, H, W] or [B, C, H, W]; of models
    that look at several frames [T, H, W, C] or [B, T, H, W, C].
    """

    name: str
    data: Bytes
    shape: tuple[int, ...] = ()
    dtype: str = "uint8"
    encoding: Literal["raw", "jpeg", "png"] = "raw"
    layout: Literal["hwc", "chw"] = "hwc"


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request; payload bytes are views of what was received.

    state: [D] or [B, D].  instruction: of every row, ``instructions`` one per row instead.
    horizon: rows of actions wanted, 0 = the model's.  options: seed, num_steps, session_id, seq and
    others the model takes.  inputs: named tensors of a tensor model.
    """

    request_id: str
    model: str
    images: tuple[ImageData, ...] = ()
    state: TensorData | None = None
    instruction: str | None = None
    instructions: tuple[str, ...] = ()
    horizon: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, TensorData] = field(default_factory=dict)
    extensions: Mapping[str, Any] = field(default_factory=dict)
    timestamp_ns: int = 0


@dataclass(frozen=True, slots=True)
class InferReply:
    """actions: float32 [H, A] or [B, H, A].  outputs: named tensors of a tensor model."""

    request_id: str
    actions: TensorData | None = None
    outputs: Mapping[str, TensorData] = field(default_factory=dict)
    inference_time_us: int = 0
    extensions: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Call:
    """Circumstances of a request: who asks, in which protocol, until when.

    deadline: ``time.monotonic()`` seconds; None = the route's default.  robot: key of the latest-
    wins mailbox; None = every request counts.

    >>> Call("grpc").remaining(10.0)
    10.0
    """

    protocol: str
    deadline: float | None = None
    robot: str | None = None
    principal: str | None = None
    peer: str = ""

    def remaining(self, default: float) -> float:
        """Return the seconds left, ``default`` without a deadline; 0 when it has passed."""
        return default if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
