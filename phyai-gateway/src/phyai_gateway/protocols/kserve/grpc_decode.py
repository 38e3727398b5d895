"""KServe v2 messages of gRPC to requests, and replies back; no sockets."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from google.protobuf.message import DecodeError as WireError

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import MIB, DecodeError
from phyai_gateway.messages import Fault, InferReply, InferRequest, TensorData
from phyai_gateway.proto import kserve_v2_pb2 as pb
from phyai_gateway.proto.wire import MAX_FIELDS, MAX_SHAPE_BYTES, fields
from phyai_gateway.protocols.kserve.tensors import (
    DATATYPES,
    MAX_INPUTS,
    MAX_TEXT,
    NAMES,
    Input,
    from_bytes,
    outputs_of,
    request_of,
)

MAX_TYPED_BYTES = 4 * MIB
"""Of all values that are not sent as raw bytes: one byte of those may take eight when parsed."""
MAX_ID = 256

# Where a request has parts, to count them before they are parsed.
_PARTS: Mapping[str, Mapping[int, str]] = {
    "request": {4: "leaf", 5: "input", 6: "output"},
    "input": {3: "shape", 4: "leaf", 5: "contents"},
    "output": {2: "leaf"},
    "contents": dict.fromkeys(range(1, 8), "values"),
}
# Datatype -> field of the contents and array type of its values.
_TYPED = {
    "BOOL": ("bool_contents", "B"),
    "UINT8": ("uint_contents", "B"),
    "INT32": ("int_contents", "i"),
    "INT64": ("int64_contents", "q"),
    "FP32": ("fp32_contents", "f"),
    "FP64": ("fp64_contents", "d"),
}


@dataclass(frozen=True, slots=True)
class Decoded:
    """A message's content. typed: its values came as typed contents.  ends: sequence_end."""

    request: InferRequest
    client_id: str
    wanted: tuple[str, ...]
    typed: bool
    ends: bool = False


def parse(payload: bytes) -> Any:
    """Return the ModelInferRequest in the bytes, its parts counted first; raises DecodeError."""
    try:
        _count("request", memoryview(payload), [MAX_FIELDS, MAX_TYPED_BYTES])
        return pb.ModelInferRequest.FromString(payload)
    except DecodeError:
        raise
    except (Fault, WireError):
        raise DecodeError(
            f"message must be a ModelInferRequest of at most {MAX_FIELDS} fields; it is not."
        ) from None


def _count(kind: str, view: memoryview, left: list[int]) -> None:
    """Step through a message; left: fields and bytes of typed values that may still come."""
    parts = _PARTS[kind]
    for field, value in fields(view):
        left[0] -= 1
        inner = parts.get(field)
        if inner == "shape" and isinstance(value, memoryview) and len(value) > MAX_SHAPE_BYTES:
            raise DecodeError("shape must have at most 8 sizes; got more.")
        if inner == "values":
            left[1] -= len(value) if isinstance(value, memoryview) else 8
        elif inner is not None and inner in _PARTS and isinstance(value, memoryview):
            _count(inner, value, left)
        if left[0] < 0:
            raise DecodeError(f"message must have at most {MAX_FIELDS} fields; it has more.")
        if left[1] < 0:
            raise DecodeError(
                f"typed contents must have at most {MAX_TYPED_BYTES} bytes; they have more. Send "
                "raw_input_contents."
            )


def decode(message: Any, contract: ModelContract) -> Decoded:
    """Return the request of a ModelInferRequest; raises DecodeError."""
    count, raw = len(message.inputs), len(message.raw_input_contents)
    if not 0 < count <= MAX_INPUTS:
        raise DecodeError(f"inputs must be 1 to {MAX_INPUTS} tensors; got {count}.")
    if raw and raw != count:
        raise DecodeError(f"raw_input_contents must be one per input; got {raw} for {count}.")
    if len(message.outputs) > MAX_INPUTS:
        raise DecodeError(f"outputs must be at most {MAX_INPUTS}; got {len(message.outputs)}.")
    if len(message.id) > MAX_ID:
        raise DecodeError(f"id must have at most {MAX_ID} characters; got {len(message.id)}.")
    inputs = []
    for index, row in enumerate(message.inputs):
        name, shape = _checked(row)
        if not raw:
            inputs.append(_typed(name, row.datatype, shape, row.contents))
            continue
        if row.HasField("contents"):
            raise DecodeError(f"{name!r:.80} must have contents or raw_input_contents, not both.")
        data = memoryview(message.raw_input_contents[index])
        inputs.append(from_bytes(name, row.datatype, shape, data))
    parameters = {key: _parameter(key, value) for key, value in message.parameters.items()}
    request = request_of(inputs, parameters, contract)
    wanted = tuple(row.name for row in message.outputs)
    ends = parameters.get("sequence_end") is True
    return Decoded(request, message.id, wanted, not raw, ends)


def _checked(row: Any) -> tuple[str, tuple[int, ...]]:
    name, shape = row.name, tuple(row.shape)
    if not 0 < len(name) <= 256:
        raise DecodeError("name of an input must be a text of 1 to 256 characters.")
    if row.datatype not in (*DATATYPES, "BYTES"):
        raise DecodeError(f"datatype of {name!r:.80} must be one of {', '.join(DATATYPES)}, BYTES.")
    if len(shape) > 8 or not all(0 <= size <= 1 << 31 for size in shape):
        raise DecodeError(f"shape of {name!r:.80} must be at most 8 sizes from 0.")
    return name, shape


def _typed(name: str, datatype: str, shape: tuple[int, ...], contents: Any) -> Input:
    if datatype == "BYTES":
        return _texts(name, shape, list(contents.bytes_contents))
    if datatype not in _TYPED:
        raise DecodeError(f"{name!r:.80} of {datatype} must be sent as raw_input_contents.")
    field, code = _TYPED[datatype]
    values = getattr(contents, field)
    if len(values) != prod(shape):
        raise DecodeError(
            f"{name!r:.80} must have {prod(shape)} values in contents.{field}; got {len(values)}."
        )
    try:
        data = array(code, values).tobytes()
    except OverflowError:
        raise DecodeError(f"values of {name!r:.80} must fit {datatype}.") from None
    return Input(name, datatype, shape, TensorData(data, shape, DATATYPES[datatype][0]), ())


def _texts(name: str, shape: tuple[int, ...], found: Sequence[bytes]) -> Input:
    if len(found) != prod(shape) or any(len(text) > MAX_TEXT for text in found):
        raise DecodeError(
            f"{name!r:.80} must hold {prod(shape)} texts of at most {MAX_TEXT} bytes; got "
            f"{len(found)}."
        )
    try:
        texts = tuple(text.decode() for text in found)
    except UnicodeDecodeError:
        raise DecodeError(f"texts of {name!r:.80} must be UTF-8.") from None
    return Input(name, "BYTES", shape, None, texts)


def _parameter(key: str, value: Any) -> bool | int | float | str:
    kind = value.WhichOneof("parameter_choice")
    if kind is None:
        raise DecodeError(f"parameter {key!r:.80} must have a value; it has none.")
    found: bool | int | float | str = getattr(value, kind)
    if isinstance(found, float) and not math.isfinite(found):
        raise DecodeError(f"parameter {key!r:.80} must be finite; got {found}.")
    return found


def encode(reply: InferReply, decoded: Decoded) -> bytes:
    """Return the ModelInferResponse: typed contents where the request had them, else raw bytes.

    Raises DecodeError for an output that the model does not give.
    """
    outputs = outputs_of(reply, decoded.wanted)
    typed = decoded.typed and all(NAMES[t.dtype] in _TYPED for t in outputs.values())
    message = pb.ModelInferResponse(
        model_name=decoded.request.model, model_version="1", id=decoded.client_id
    )
    for name, tensor in outputs.items():
        datatype = NAMES[tensor.dtype]
        row = message.outputs.add(name=name, datatype=datatype, shape=tensor.shape)
        if not typed:
            message.raw_output_contents.append(bytes(tensor.data))
            continue
        field, code = _TYPED[datatype]
        values = array(code)
        values.frombytes(tensor.data)
        getattr(row.contents, field).extend(map(bool, values) if datatype == "BOOL" else values)
    return bytes(message.SerializeToString())
