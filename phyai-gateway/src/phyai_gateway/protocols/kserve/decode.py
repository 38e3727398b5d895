"""KServe v2 bodies to requests, and replies back; no sockets."""

from __future__ import annotations

import json
import math
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.messages import ImageData, InferReply, InferRequest, TensorData

MAX_INPUTS = 256
MAX_DEPTH = 32
MAX_TEXT = 64 * 1024
MAX_JSON_CELLS = 1 << 20  # numbers written as JSON; larger tensors go as bytes
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
class Decoded:
    """A body's content. binary: output names wanted as bytes, True = all.  ends: sequence_end."""

    request: InferRequest
    client_id: str
    binary: bool | frozenset[str]
    wanted: tuple[str, ...]
    ends: bool = False


@dataclass(frozen=True, slots=True)
class _Input:
    name: str
    datatype: str
    shape: tuple[int, ...]
    tensor: TensorData | None
    texts: tuple[str, ...]


def decode(body: bytes, header_length: int | None, contract: ModelContract) -> Decoded:
    """Return the request of a body; raises DecodeError.

    header_length: bytes of JSON, the value of Inference-Header-Content-Length; None = all.
    """
    if header_length is not None and not 0 < header_length <= len(body):
        raise DecodeError("Inference-Header-Content-Length must be within the body.")
    view = memoryview(body)
    head = len(body) if header_length is None else header_length
    value = _json(bytes(view[:head]))
    rows = value.get("inputs")
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_INPUTS:
        raise DecodeError(f"inputs must be a list of 1 to {MAX_INPUTS} tensors.")
    inputs, at = [], head
    for row in rows:
        found, size = _input(row, view[at:])
        inputs.append(found)
        at += size
    if at != len(body):
        raise DecodeError(f"body must end with its last tensor; {len(body) - at} bytes are left.")
    if len({one.name for one in inputs}) != len(inputs):
        raise DecodeError("inputs must have different names.")
    identity = value.get("id", "")
    if not isinstance(identity, str) or len(identity) > 256:
        raise DecodeError("id must be a text of at most 256 characters.")
    parameters = _map(value.get("parameters"), "parameters")
    binary, wanted = _outputs(value.get("outputs"), parameters)
    ends = parameters.get("sequence_end") is True
    return Decoded(_request(inputs, parameters, contract), identity, binary, wanted, ends)


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise DecodeError("body must begin with a JSON object; it does not.") from None
    if not isinstance(found, dict):
        raise DecodeError("body must begin with a JSON object; it is another value.")
    level: list[Any] = [found]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise DecodeError(f"JSON must nest at most {MAX_DEPTH} deep.")
        children = [c for v in level for c in (v.values() if isinstance(v, dict) else v)]
        level = [child for child in children if isinstance(child, dict | list)]
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _map(found: Any, name: str) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise DecodeError(f"{name} must be a map; got {type(found).__name__}.")
    return found


# ---------------------------------------------------------------- inputs


def _input(row: Any, rest: memoryview) -> tuple[_Input, int]:
    """Return an input, and how many of the bytes after the JSON are its."""
    row = _map(row, "an input")
    name, datatype, shape = row.get("name"), row.get("datatype"), row.get("shape")
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise DecodeError("name of an input must be a text of 1 to 256 characters.")
    if datatype not in (*DATATYPES, "BYTES"):
        raise DecodeError(f"datatype of {name!r:.80} must be one of {', '.join(DATATYPES)}, BYTES.")
    if (
        not isinstance(shape, list)
        or len(shape) > 8
        or not all(type(size) is int and 0 <= size <= 1 << 31 for size in shape)
    ):
        raise DecodeError(f"shape of {name!r:.80} must be at most 8 sizes.")
    size = _map(row.get("parameters"), "parameters of an input").get("binary_data_size")
    if size is None:
        return _from_json(name, datatype, tuple(shape), row.get("data")), 0
    if type(size) is not int or not 0 <= size <= len(rest):
        raise DecodeError(f"binary_data_size of {name!r:.80} must be bytes that the body has.")
    if "data" in row:
        raise DecodeError(f"{name!r:.80} must have data or binary_data_size, not both.")
    return _from_bytes(name, datatype, tuple(shape), rest[:size]), size


def _from_bytes(name: str, datatype: str, shape: tuple[int, ...], data: memoryview) -> _Input:
    if datatype == "BYTES":
        texts = _texts_of(name, prod(shape), data)
        return _Input(name, datatype, shape, None, texts)
    wanted = prod(shape) * _SIZES[datatype]
    if len(data) != wanted:
        raise DecodeError(f"{name!r:.80} must have {wanted} bytes; got {len(data)}.")
    return _Input(name, datatype, shape, TensorData(data, shape, DATATYPES[datatype][0]), ())


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


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> _Input:
    flat = _flattened(name, data)
    if len(flat) != prod(shape):
        raise DecodeError(f"{name!r:.80} must have {prod(shape)} values; got {len(flat)}.")
    if datatype == "BYTES":
        if not all(isinstance(text, str) and len(text) <= MAX_TEXT for text in flat):
            raise DecodeError(f"{name!r:.80} must hold texts of at most {MAX_TEXT} characters.")
        return _Input(name, datatype, shape, None, tuple(flat))
    dtype, form = DATATYPES[datatype]
    if not form:
        raise DecodeError(f"{name!r:.80} of BF16 must be sent as bytes.")
    kinds = {"?": (bool,), "e": (int, float), "f": (int, float), "d": (int, float)}
    allowed = kinds.get(form, (int,))
    if not all(type(value) in allowed for value in flat):
        raise DecodeError(f"values of {name!r:.80} must be {datatype}.")
    try:
        packed = struct.pack(f"<{len(flat)}{form}", *flat)
    except (struct.error, OverflowError):
        raise DecodeError(f"values of {name!r:.80} must fit {datatype}.") from None
    return _Input(name, datatype, shape, TensorData(packed, shape, dtype), ())


def _flattened(name: str, data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise DecodeError(f"data of {name!r:.80} must be a list, or binary_data_size given.")
    out: list[Any] = []
    stack = [iter(data)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            out.append(item)
            if len(out) > MAX_JSON_CELLS:
                raise DecodeError(f"{name!r:.80} is too large for JSON. Send it as bytes.")
        else:
            stack.pop()
    return out


# ---------------------------------------------------------------- to a request


def _request(
    inputs: list[_Input], parameters: Mapping[str, Any], contract: ModelContract
) -> InferRequest:
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


def _image(one: _Input) -> ImageData:
    if one.datatype != "UINT8" or len(one.shape) not in (3, 4) or one.tensor is None:
        raise DecodeError(f"camera {one.name!r:.80} must be UINT8 [1, H, W, 3] or [H, W, 3].")
    layout = "hwc" if one.shape[-1] == 3 or one.shape[-3] != 3 else "chw"
    return ImageData(one.name, one.tensor.data, one.shape, layout=layout)  # type: ignore[arg-type]


def _state(one: _Input, contract: ModelContract) -> TensorData:
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
    sequence = parameters.get("sequence_id")
    if sequence not in (None, 0, ""):
        if not isinstance(sequence, int | str) or isinstance(sequence, bool):
            raise DecodeError("sequence_id must be an integer or a text.")
        options["session_id"] = str(sequence)
        if parameters.get("sequence_start") is True:
            options["seq"] = 0
    return options


def _outputs(
    found: Any, parameters: Mapping[str, Any]
) -> tuple[bool | frozenset[str], tuple[str, ...]]:
    everything = parameters.get("binary_data_output", False)
    if not isinstance(everything, bool):
        raise DecodeError("binary_data_output must be true or false.")
    if found is None:
        return everything, ()
    if not isinstance(found, list) or len(found) > MAX_INPUTS:
        raise DecodeError("outputs must be a list.")
    names, binary = [], set()
    for row in found:
        name = _map(row, "an output").get("name")
        if not isinstance(name, str):
            raise DecodeError("name of an output must be a text.")
        names.append(name)
        if _map(row.get("parameters"), "parameters of an output").get("binary_data", everything):
            binary.add(name)
    return frozenset(binary), tuple(names)


# ---------------------------------------------------------------- replies


def encode(reply: InferReply, decoded: Decoded) -> tuple[bytes, int | None]:
    """Return the body and, where tensors follow the JSON, the JSON's length.

    Raises DecodeError for an output that the model does not give.
    """
    outputs = dict(reply.outputs)
    if reply.actions is not None:
        actions = reply.actions
        shape = actions.shape if len(actions.shape) == 3 else (1, *actions.shape)
        outputs["actions"] = TensorData(actions.data, shape, actions.dtype)
    missing = sorted(set(decoded.wanted) - set(outputs))
    if missing:
        raise DecodeError(
            f"outputs must be of {', '.join(sorted(outputs))}; got {', '.join(missing)!r:.200}."
        )
    rows, tails = [], []
    for name in decoded.wanted or sorted(outputs):
        tensor = outputs[name]
        row: dict[str, Any] = {
            "name": name,
            "datatype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
        }
        asked = decoded.binary
        as_bytes = asked if isinstance(asked, bool) else name in asked
        form = DATATYPES[NAMES[tensor.dtype]][1]
        if as_bytes or not form:
            row["parameters"] = {"binary_data_size": tensor.nbytes}
            tails.append(bytes(tensor.data))
        else:
            row["data"] = list(struct.unpack(f"<{prod(tensor.shape)}{form}", tensor.data))
        rows.append(row)
    head = {"model_name": decoded.request.model, "id": decoded.client_id, "outputs": rows}
    text = json.dumps(head).encode()
    return b"".join([text, *tails]), len(text) if tails else None
