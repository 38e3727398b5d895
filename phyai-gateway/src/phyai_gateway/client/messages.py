"""Requests from arrays, and answers as arrays."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from phyai_gateway.messages import Fault, ImageData, InferReply, InferRequest, TensorData
from phyai_gateway.proto.codec import decode_reply, encode_request

Picture: TypeAlias = "np.ndarray[Any, Any] | bytes"
"""uint8 RGB [H, W, 3] or [B, H, W, 3], or the bytes of a JPEG or PNG file."""

_MAGIC: tuple[tuple[bytes, Any], ...] = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG\r\n\x1a\n", "png"))
_DTYPES = {
    "uint8": "<u1",
    "int32": "<i4",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "bool": "?",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """actions: float32 [H, A] or [B, H, A], robot units; None from a tensor model.

    outputs: named arrays, such as ``model_actions`` [H, A_model].  inference_s: seconds in the
    model.  extensions: what else the server says, such as control_hz and mask.
    """

    request_id: str
    actions: np.ndarray[Any, Any] | None
    outputs: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    inference_s: float = 0.0
    extensions: Mapping[str, Any] = field(default_factory=dict)


def request_of(
    model: str,
    images: Mapping[str, Picture],
    state: Any,
    prompt: str | Sequence[str] | None,
    *,
    horizon: int = 0,
    options: Mapping[str, Any] | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> InferRequest:
    """Return a request with a new id; raises Fault(invalid_argument) for values of wrong type."""
    several = () if prompt is None or isinstance(prompt, str) else _prompts(prompt)
    if type(horizon) is not int or not 0 <= horizon < 2**32:
        raise _bad(f"horizon must be an int >= 0; got {horizon!r}.")
    return InferRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        images=tuple(_image(name, picture) for name, picture in images.items()),
        state=None if state is None else _state(state),
        instruction=prompt if isinstance(prompt, str) else None,
        instructions=several,
        horizon=horizon,
        options=dict(options or {}),
        extensions=dict(extensions or {}),
        timestamp_ns=time.time_ns(),
    )


def tensor_request_of(
    model: str, inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None
) -> InferRequest:
    """Return a request of a tensor model; raises Fault(invalid_argument)."""
    return InferRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        inputs={name: _tensor(name, np.asarray(value)) for name, value in inputs.items()},
        extensions={"parameters": dict(parameters)} if parameters else {},
        timestamp_ns=time.time_ns(),
    )


def encoded(request: InferRequest) -> bytes:
    """Return the bytes of a request."""
    return encode_request(request)


def answer_of(request: InferRequest, raw: bytes) -> Answer:
    """Return the answer in ``raw``.

    Raises: Fault(data_loss) when it answers another request or cannot be read.
    """
    reply: InferReply = decode_reply(raw)
    if reply.request_id != request.request_id:
        raise Fault("data_loss", "server answered another request; its answer was dropped.")
    return Answer(
        reply.request_id,
        None if reply.actions is None else _array(reply.actions),
        {name: _array(tensor) for name, tensor in reply.outputs.items()},
        reply.inference_time_us / 1e6,
        reply.extensions,
    )


def actions_of(answer: Answer) -> np.ndarray[Any, Any]:
    """Return the actions; raises Fault(data_loss) when there are none."""
    if answer.actions is None:
        raise Fault("data_loss", "server must answer with actions; it sent none.", started=True)
    return answer.actions


def _prompts(given: object) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise _bad(f"prompt must be a text, or a list of one per row; got {type(given).__name__}.")
    return tuple(given)


def _image(name: str, picture: Picture) -> ImageData:
    if isinstance(picture, bytes | bytearray | memoryview):
        head = bytes(picture[:8])
        for magic, encoding in _MAGIC:
            if head.startswith(magic):
                return ImageData(name, bytes(picture), (), "uint8", encoding)
        raise _bad(f"bytes of image {name!r} must be a JPEG or PNG file; got something else.")
    array = np.asarray(picture)
    if array.dtype != np.uint8 or array.ndim not in (3, 4, 5) or array.shape[-1] != 3:
        raise _bad(
            f"image {name!r} must be uint8 RGB [H, W, 3] or [B, H, W, 3]; got {array.dtype} "
            f"{list(array.shape)}."
        )
    return ImageData(name, array.tobytes(), tuple(array.shape))


def _state(value: Any) -> TensorData:
    try:
        array = np.asarray(value, dtype="<f4")
    except (TypeError, ValueError) as error:
        raise _bad(f"state must be numbers; got {type(value).__name__}.") from error
    return TensorData(array.tobytes(), tuple(array.shape), "float32")


def _tensor(name: str, array: np.ndarray[Any, Any]) -> TensorData:
    code = _DTYPES.get(array.dtype.name)
    if code is None:
        raise _bad(f"input {name!r} must be one of {', '.join(_DTYPES)}; got {array.dtype}.")
    return TensorData(np.asarray(array, code).tobytes(), tuple(array.shape), array.dtype.name)


def _array(tensor: TensorData) -> np.ndarray[Any, Any]:
    """Return a writable array; bfloat16 as float32, which numpy has."""
    if tensor.dtype == "bfloat16":
        halves = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return halves.view("<f4").reshape(tensor.shape)
    try:
        return np.frombuffer(tensor.data, _DTYPES[tensor.dtype]).reshape(tensor.shape).copy()
    except (ValueError, OverflowError):  # no elements, but other sizes that numpy can't have
        raise Fault(
            "data_loss", f"server must answer with arrays; got one of {list(tensor.shape)}."
        ) from None


def _bad(message: str) -> Fault:
    return Fault("invalid_argument", message)
