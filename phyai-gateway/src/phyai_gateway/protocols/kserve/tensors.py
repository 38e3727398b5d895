"""A KServe v2 request's tensors, however they came, as a model's request; and a reply's outputs."""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.messages import ImageData, InferReply, InferRequest, TensorData

MAX_INPUTS = 256
MAX_TEXT = 64 * 1024
DATATYPES = {
    "BOOL": ("bool", "?"),
    "UINT8": ("uint8", "B"),
    "INT32": ("int32", "i"),
    "INT64": ("int64", "q"),
    "FP16": ("float16", "e"),
    "BF16": ("bfloat16", ""),
    "FP32": ("float32", "f"),
    "FP64": ("float64", "d"),
}
NAMES = {dtype: name for name, (dtype, _) in DATATYPES.items()}
_SIZES = {"BOOL": 1, "UINT8": 1, "INT32": 4, "INT64": 8, "FP16": 2, "BF16": 2} | {
    "FP32": 4,
    "FP64": 8,
}


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor: texts of BYTES, a tensor of the others."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    tensor: TensorData | None
    texts: tuple[str, ...]


def from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> Input:
    """Return the input of a tensor's raw bytes; raises DecodeError when they do not fit."""
    if datatype == "BYTES":
        texts = _texts_of(name, prod(shape), data)
        return Input(name, datatype, shape, None, texts)
    wanted = prod(shape) * _SIZES[datatype]
    if len(data) != wanted:
        raise DecodeError(f"{name!r:.80} must have {wanted} bytes; got {len(data)}.")
    return Input(name, datatype, shape, TensorData(data, shape, DATATYPES[datatype][0]), ())


def _texts_of(name: str, count: int, data: memoryview) -> tuple[str, ...]:
    texts: list[str] = []
    at = 0
    while at < len(data) and len(texts) < count:
        if at + 4 > len(data):
            break
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length > MAX_TEXT or at + length > len(data):
            raise DecodeError(
                f"a text of {name!r:.80} must have at most {MAX_TEXT} bytes, all sent."
            )
        texts.append(_utf8(name, bytes(data[at : at + length])))
        at += length
    if at != len(data) or len(texts) != count:
        raise DecodeError(f"{name!r:.80} must hold {count} texts, each after its length.")
    return tuple(texts)


def _utf8(name: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise DecodeError(f"texts of {name!r:.80} must be UTF-8.") from None


def check_utf8(name: str, text: str) -> None:
    """Raise DecodeError for a text that UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can escape half a surrogate pair
        raise DecodeError(f"texts of {name!r:.80} must be UTF-8.") from None


def request_of(
    inputs: Sequence[Input], parameters: Mapping[str, Any], contract: ModelContract
) -> InferRequest:
    """Return the model's request; raises DecodeError for inputs and parameters it does not take."""
    if len({one.name for one in inputs}) != len(inputs):
        raise DecodeError("inputs must have different names.")
    options = _options(parameters)
    base: dict[str, Any] = {
        "request_id": uuid.uuid4().hex,
        "model": contract.name,
        "options": options,
    }
    policy = bool(contract.cameras) or contract.state_dim > 0
    known = set(contract.cameras) | {"state", "prompt"}
    odd = sorted(one.name for one in inputs if one.name not in known)
    if policy and odd:
        raise DecodeError(
            f"inputs must be of {', '.join(sorted(known))}; got {', '.join(odd)!r:.200}."
        )
    if not policy and any(one.tensor is None for one in inputs if one.name != "prompt"):
        raise DecodeError("inputs of datatype BYTES other than prompt must not be sent.")
    found: dict[str, Any] = {}
    for one in inputs:
        if one.name == "prompt" and one.datatype == "BYTES":
            found |= (
                {"instruction": one.texts[0]}
                if len(one.texts) == 1
                else {"instructions": one.texts}
            )
    if not policy:
        tensors = {one.name: one.tensor for one in inputs if one.tensor is not None}
        return InferRequest(**base, inputs=tensors, **found)
    images = tuple(_image(one) for one in inputs if one.name in contract.cameras)
    states = [_state(one, contract) for one in inputs if one.name == "state"]
    if any(one.name == "prompt" and one.datatype != "BYTES" for one in inputs):
        raise DecodeError("prompt must be of datatype BYTES.")
    return InferRequest(**base, images=images, state=states[0] if states else None, **found)


def _image(one: Input) -> ImageData:
    if one.datatype != "UINT8" or len(one.shape) not in (3, 4) or one.tensor is None:
        raise DecodeError(f"camera {one.name!r:.80} must be UINT8 [1, H, W, 3] or [H, W, 3].")
    layout = "hwc" if one.shape[-1] == 3 or one.shape[-3] != 3 else "chw"
    return ImageData(one.name, one.tensor.data, one.shape, layout=layout)  # type: ignore[arg-type]


def _state(one: Input, contract: ModelContract) -> TensorData:
    if one.datatype not in ("FP32", "FP64") or len(one.shape) not in (1, 2) or one.tensor is None:
        raise DecodeError("state must be FP32 [1, D] or [D].")
    if contract.state_dim and one.shape[-1] != contract.state_dim:
        raise DecodeError(f"state must have {contract.state_dim} values; got {one.shape[-1]}.")
    form = DATATYPES[one.datatype][1]
    values = struct.unpack(f"<{prod(one.shape)}{form}", one.tensor.data)
    if not all(math.isfinite(value) for value in values):
        raise DecodeError("state must be finite; got NaN or infinity.")
    if one.datatype == "FP32":
        return one.tensor
    try:
        packed = struct.pack(f"<{len(values)}f", *values)
    except OverflowError:
        raise DecodeError("state must fit into float32; got a larger number.") from None
    return TensorData(packed, one.shape, "float32")


def _options(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's options; Triton's sequence words name the session."""
    skipped = ("binary_data_output", "sequence_id", "sequence_start", "sequence_end")
    options = {key: value for key, value in parameters.items() if key not in skipped}
    for key, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise DecodeError(f"parameter {key!r:.80} must be a text, number or truth value.")
        if isinstance(value, float) and not math.isfinite(value):
            raise DecodeError(f"parameter {key!r:.80} must be finite; got {value}.")
    sequence = parameters.get("sequence_id")
    if sequence not in (None, 0, ""):
        if not isinstance(sequence, int | str) or isinstance(sequence, bool):
            raise DecodeError("sequence_id must be an integer or a text.")
        options["session_id"] = str(sequence)
        if parameters.get("sequence_start") is True:
            options["seq"] = 0
    return options


def outputs_of(reply: InferReply, wanted: Sequence[str]) -> dict[str, TensorData]:
    """Return the outputs by name, actions as [B, H, A]; all of them where none is asked for.

    Raises DecodeError for an output that the model does not give.
    """
    outputs = dict(reply.outputs)
    if reply.actions is not None:
        actions = reply.actions
        shape = actions.shape if len(actions.shape) == 3 else (1, *actions.shape)
        outputs["actions"] = TensorData(actions.data, shape, actions.dtype)
    missing = sorted(set(wanted) - set(outputs))
    if missing:
        raise DecodeError(
            f"outputs must be of {', '.join(sorted(outputs))}; got {', '.join(missing)!r:.200}."
        )
    return {name: outputs[name] for name in wanted or sorted(outputs)}
