"""Between serialised robot.inference.v1 messages and ``phyai_gateway.messages``.

Decoded payloads are views of one bytes object per tensor, which protobuf copies out of the message
once; encoding copies the pixels of a request once, into the message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from phyai_gateway.messages import (
    Bytes,
    Fault,
    ImageData,
    InferReply,
    InferRequest,
    TensorData,
)
from phyai_gateway.proto import extensions
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.wire import (
    MAX_NAME_BYTES,
    REPLY_PARTS,
    REQUEST_PARTS,
    check_parts,
    varint,
)

MAX_IMAGES = 64
MAX_INPUTS = 256
MAX_ROWS = 4096
MAX_DIMS = 8
_IMAGE_TAG, _DATA_TAG = b"\x1a", b"\x12"  # images of a request, data of an image

_DTYPES = {
    pb.DATA_TYPE_UINT8: "uint8",
    pb.DATA_TYPE_INT32: "int32",
    pb.DATA_TYPE_INT64: "int64",
    pb.DATA_TYPE_FLOAT16: "float16",
    pb.DATA_TYPE_BFLOAT16: "bfloat16",
    pb.DATA_TYPE_FLOAT32: "float32",
    pb.DATA_TYPE_FLOAT64: "float64",
    pb.DATA_TYPE_BOOL: "bool",
}
_DTYPE_NUMBERS = {name: number for number, name in _DTYPES.items()}
_ENCODINGS: dict[Any, Any] = {
    pb.IMAGE_ENCODING_RAW: "raw",
    pb.IMAGE_ENCODING_JPEG: "jpeg",
    pb.IMAGE_ENCODING_PNG: "png",
}
_ENCODING_NUMBERS = {name: number for number, name in _ENCODINGS.items()}
_LAYOUTS: dict[Any, Any] = {pb.IMAGE_LAYOUT_HWC: "hwc", pb.IMAGE_LAYOUT_CHW: "chw"}
_LAYOUT_NUMBERS = {name: number for number, name in _LAYOUTS.items()}


# ---------------------------------------------------------------- requests


def decode_request(payload: bytes) -> InferRequest:
    """Return the request in a serialised InferenceRequest.

    ``extensions_json.options`` and ``.instructions`` become fields of their own.
    Raises: Fault(invalid_argument) naming the field that is wrong.
    """
    check_parts(payload, REQUEST_PARTS)
    message = _parse(pb.InferenceRequest, payload)
    for name, value in (("request_id", message.request_id), ("model_name", message.model_name)):
        if len(value) > MAX_NAME_BYTES:
            raise _bad(f"{name} must have at most {MAX_NAME_BYTES} characters; got {len(value)}.")
    _check_count("images", len(message.images), MAX_IMAGES)
    _check_count("inputs", len(message.inputs), MAX_INPUTS)
    found = extensions.read(message.extensions_json)
    options, instructions = _options(found), _instructions(found)
    state = message.robot_state if message.HasField("robot_state") else None
    return InferRequest(
        request_id=message.request_id,
        model=message.model_name,
        images=tuple(_image(image) for image in message.images),
        state=_state(state),
        instruction=message.instruction or None,
        instructions=instructions,
        horizon=message.requested_action_horizon,
        options=options,
        inputs={name: _tensor(f"inputs[{name!r}]", t) for name, t in message.inputs.items()},
        extensions=found,
        timestamp_ns=message.timestamp_ns,
    )


def encode_request(request: InferRequest) -> bytes:
    """Return the serialised InferenceRequest.

    Raises: Fault(invalid_argument) for options or extensions that JSON cannot express.
    """
    found = dict(request.extensions)
    if request.options:
        found["options"] = dict(request.options)
    if request.instructions:
        found["instructions"] = list(request.instructions)
    message = pb.InferenceRequest(
        request_id=request.request_id,
        timestamp_ns=request.timestamp_ns,
        instruction=request.instruction or "",
        requested_action_horizon=request.horizon,
        extensions_json=extensions.write(found),
        model_name=request.model,
        inputs={name: _tensor_message(t) for name, t in request.inputs.items()},
    )
    if request.state is not None:
        message.robot_state.CopyFrom(_tensor_message(request.state))
    parts: list[Bytes] = [message.SerializeToString()]
    for image in request.images:  # joined to it: as fields of the message they are copied thrice
        parts += _image_parts(image)
    return b"".join(parts)


# ---------------------------------------------------------------- replies


def decode_reply(payload: bytes) -> InferReply:
    """Return the reply in a serialised InferenceResponse.

    Raises: Fault(data_loss) when the bytes are no such message.
    """
    try:
        check_parts(payload, REPLY_PARTS)
        message = _parse(pb.InferenceResponse, payload)
        return InferReply(
            request_id=message.request_id,
            actions=_tensor("actions", message.actions) if message.HasField("actions") else None,
            outputs={name: _tensor(f"outputs[{name!r}]", t) for name, t in message.outputs.items()},
            inference_time_us=message.inference_time_us,
            extensions=extensions.read(message.extensions_json),
        )
    except Fault as error:
        raise Fault("data_loss", f"Server's reply cannot be read: {error.message}") from error


def encode_reply(reply: InferReply) -> bytes:
    """Return the serialised InferenceResponse."""
    message = pb.InferenceResponse(
        request_id=reply.request_id,
        inference_time_us=reply.inference_time_us,
        extensions_json=extensions.write(reply.extensions),
        outputs={name: _tensor_message(t) for name, t in reply.outputs.items()},
    )
    if reply.actions is not None:
        message.actions.CopyFrom(_tensor_message(reply.actions))
    return bytes(message.SerializeToString())


# ---------------------------------------------------------------- parts


def _parse(kind: Any, payload: bytes) -> Any:
    try:
        return kind.FromString(payload)
    except DecodeError:
        raise _bad(
            "message must be a robot.inference.v1 protobuf; got bytes that cannot be parsed. "
            "Check the client's message definition."
        ) from None


def _tensor(name: str, message: pb.Tensor) -> TensorData:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise _bad(f"{name} must have one of the data types 1 to 8; got {message.dtype}.")
    if len(message.shape) > MAX_DIMS:
        raise _bad(f"{name} must have at most {MAX_DIMS} dims; got {len(message.shape)}.")
    try:
        return TensorData(memoryview(message.data), tuple(message.shape), dtype)
    except Fault as error:
        raise Fault("invalid_argument", f"{name}: {error.message}") from error


def _state(message: pb.Tensor | None) -> TensorData | None:
    """Return the state; a client that sets an empty message sends none."""
    if message is None or not (message.data or message.shape or message.dtype):
        return None
    return _tensor("robot_state", message)


def _image(message: pb.Image) -> ImageData:
    label = f"image {message.name!r}"
    if message.encoding not in _ENCODINGS:
        raise _bad(
            f"{label} must say its encoding, RAW, JPEG or PNG; got {message.encoding}. Set it."
        )
    encoding, layout = _ENCODINGS[message.encoding], _LAYOUTS.get(message.layout)
    dtype = _DTYPES.get(message.dtype, "")
    if encoding != "raw":
        layout, dtype = layout or "hwc", dtype or "uint8"  # the file says both
    if layout is None:
        raise _bad(f"{label} must say its layout, HWC or CHW; got {message.layout}. Set it.")
    if not dtype:
        raise _bad(f"{label} must have data type UINT8 (1); got {message.dtype}.")
    if len(message.shape) > MAX_DIMS:
        raise _bad(f"{label} must have at most {MAX_DIMS} dims; got {len(message.shape)}.")
    data = memoryview(message.data)
    return ImageData(message.name, data, tuple(message.shape), dtype, encoding, layout)


def _options(found: dict[str, Any]) -> Mapping[str, Any]:
    options = found.pop("options", None)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise _bad(
            f"extensions_json.options must be an object; got {type(options).__name__}. "
            'Write {"options": {"seed": 7}}.'
        )
    return options


def _instructions(found: dict[str, Any]) -> tuple[str, ...]:
    given = found.pop("instructions", None)
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise _bad("extensions_json.instructions must be a list of texts, one per row.")
    _check_count("extensions_json.instructions", len(given), MAX_ROWS)
    return tuple(given)


def _tensor_message(tensor: TensorData) -> pb.Tensor:
    return pb.Tensor(
        data=_owned(tensor.data), shape=tensor.shape, dtype=_DTYPE_NUMBERS[tensor.dtype]
    )


def _image_parts(image: ImageData) -> tuple[Bytes, ...]:
    """Return an image as a field of the request; its pixels are the last part."""
    head = _image_head(image.name, tuple(image.shape), image.dtype, image.encoding, image.layout)
    data = image.data
    if isinstance(data, memoryview) and not data.c_contiguous:
        data = bytes(data)
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    head += _DATA_TAG + varint(size)
    return _IMAGE_TAG + varint(len(head) + size) + head, data


@lru_cache(maxsize=256)
def _image_head(name: str, shape: tuple[int, ...], dtype: str, encoding: str, layout: str) -> bytes:
    """Return an image without its pixels: the same for all of a camera."""
    number = _DTYPE_NUMBERS.get(dtype)
    if number is None:
        raise _bad(f"image {name!r} must have a known dtype; got {dtype!r}.")
    head = pb.Image(
        name=name,
        shape=_sizes(shape),
        dtype=number,
        encoding=_ENCODING_NUMBERS[encoding],
        layout=_LAYOUT_NUMBERS[layout],
    )
    return bytes(head.SerializeToString())


def _owned(data: Bytes) -> bytes:
    """Return the bytes protobuf takes; the whole of a bytes object is not copied."""
    if isinstance(data, memoryview):
        whole = data.obj
        if isinstance(whole, bytes) and data.c_contiguous and data.nbytes == len(whole):
            return whole
    return data if isinstance(data, bytes) else bytes(data)


def _sizes(shape: Iterable[int]) -> list[int]:
    return [int(size) for size in shape]


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise _bad(f"{name} must hold at most {most} entries; got {count}.")


def _bad(message: str) -> Fault:
    return Fault("invalid_argument", message)
