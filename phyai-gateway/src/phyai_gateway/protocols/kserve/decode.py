"""KServe v2 bodies to requests, and replies back; no sockets."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.messages import InferReply, InferRequest, TensorData
from phyai_gateway.protocols.kserve.tensors import (
    DATATYPES,
    MAX_INPUTS,
    MAX_TEXT,
    NAMES,
    Input,
    check_utf8,
    from_bytes,
    outputs_of,
    request_of,
)

MAX_DEPTH = 32
MAX_JSON_CELLS = 1 << 20  # numbers written as JSON; larger tensors go as bytes
MAX_JSON_LISTS = 1 << 18  # and maps: three bytes make one, which takes twenty times that


@dataclass(frozen=True, slots=True)
class Decoded:
    """A body's content. binary: output names wanted as bytes, True = all.  ends: sequence_end."""

    request: InferRequest
    client_id: str
    binary: bool | frozenset[str]
    wanted: tuple[str, ...]
    ends: bool = False


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
    identity = value.get("id", "")
    if not isinstance(identity, str) or len(identity) > 256:
        raise DecodeError("id must be a text of at most 256 characters.")
    parameters = _map(value.get("parameters"), "parameters")
    binary, wanted = _outputs(value.get("outputs"), parameters)
    ends = parameters.get("sequence_end") is True
    return Decoded(request_of(inputs, parameters, contract), identity, binary, wanted, ends)


def _json(text: bytes) -> dict[str, Any]:
    values, lists = text.count(b","), text.count(b"[") + text.count(b"{")
    if values > MAX_JSON_CELLS + 16 * MAX_INPUTS or lists > MAX_JSON_LISTS:
        raise DecodeError("JSON must have fewer values. Send large tensors as bytes.")
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


def _input(row: Any, rest: memoryview) -> tuple[Input, int]:
    """Return an input, and how many of the bytes after the JSON are its."""
    row = _map(row, "an input")
    name, datatype, shape = row.get("name"), row.get("datatype"), row.get("shape")
    if not isinstance(name, str) or not 0 < len(name) <= 256:
        raise DecodeError("name of an input must be a text of 1 to 256 characters.")
    check_utf8(name, name)
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
    return from_bytes(name, datatype, tuple(shape), rest[:size]), size


def _from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Input:
    flat = _flattened(name, data)
    if len(flat) != prod(shape):
        raise DecodeError(f"{name!r:.80} must have {prod(shape)} values; got {len(flat)}.")
    if datatype == "BYTES":
        if not all(isinstance(text, str) and len(text) <= MAX_TEXT for text in flat):
            raise DecodeError(f"{name!r:.80} must hold texts of at most {MAX_TEXT} characters.")
        for text in flat:
            check_utf8(name, text)
        return Input(name, datatype, shape, None, tuple(flat))
    dtype, form = DATATYPES[datatype]
    if not form:
        raise DecodeError(f"{name!r:.80} of BF16 must be sent as bytes.")
    kinds = {"?": (bool,), "e": (int, float), "f": (int, float), "d": (int, float)}
    allowed = kinds.get(form, (int,))
    if not all(type(value) in allowed for value in flat):
        raise DecodeError(f"values of {name!r:.80} must be {datatype}.")
    try:
        packed = struct.pack(f"<{len(flat)}{form}", *flat)
        finite = all(map(math.isfinite, flat))
    except (struct.error, OverflowError):
        finite = False
    if not finite:  # JSON has no infinity, but 1e999 reads as one
        raise DecodeError(f"values of {name!r:.80} must fit {datatype}.")
    return Input(name, datatype, shape, TensorData(packed, shape, dtype), ())


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
    rows, tails = [], []
    for name, tensor in outputs_of(reply, decoded.wanted).items():
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
