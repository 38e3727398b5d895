"""Bodies of RLinf's two forms to requests, and replies back; no sockets."""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import Array, make_array
from phyai_gateway.decode.limits import DecodeError
from phyai_gateway.decode.numpy_msgpack import MsgpackLimits, openpi_hook, pack_openpi, unpack
from phyai_gateway.messages import ImageData, InferReply, InferRequest, TensorData

Envelope = Literal["batched", "per_env"]
IMAGE_KEYS = ("main_images", "wrist_images", "extra_view_images")
MAX_BATCH = 4096
MAX_VIEWS = 16
MAX_STATE_CELLS = 1 << 20
MAX_HORIZON = (1 << 32) - 1
_DTYPES = {
    "u1": "uint8",
    "i4": "int32",
    "i8": "int64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "b1": "bool",
}
_FORMS = {"f2": "e", "f4": "f", "f8": "d"}
_NAMES = {"float16": "<f2", "float32": "<f4", "float64": "<f8", "uint8": "|u1", "bool": "|b1"} | {
    "int32": "<i4",
    "int64": "<i8",
}


@dataclass(frozen=True, slots=True)
class Decoded:
    """A body's content. envelope: which form it had, and so its answer has."""

    request: InferRequest
    envelope: bool
    rows: int


def unpack_body(body: bytes, max_bytes: int) -> Any:
    """Return the body's value with its arrays; raises DecodeError: these bytes are no msgpack."""
    return unpack(body, openpi_hook, MsgpackLimits(payload_bytes=max_bytes, text_bytes=1 << 20))


def decode(value: Any, default_model: str | None, only_model: str | None = None) -> Decoded:
    """Return the request of an unpacked body; raises DecodeError for wrong content.

    only_model: the one to take where nothing names any.
    """
    if not isinstance(value, dict):
        raise DecodeError(f"body must be a map; got {type(value).__name__}.")
    model = _model(value, default_model or only_model)
    if "input" in value:
        return Decoded(_envelope(value, model), True, 0)
    return _flat(value, model)


def _model(value: Mapping[str, Any], default: str | None) -> str:
    named = [value[key] for key in ("model_name", "model") if value.get(key) is not None]
    if not all(isinstance(name, str) and 0 < len(name) <= 256 for name in named):
        raise DecodeError("model_name must be a text of 1 to 256 characters.")
    if len(set(named)) > 1:
        raise DecodeError("model_name and model must be equal; they differ. Send one of them.")
    found = named[0] if named else default
    if found is None:
        raise DecodeError("model_name must be given, as the listener has no model of its own.")
    return str(found)


# ---------------------------------------------------------------- flat


def _flat(value: Mapping[str, Any], model: str) -> Decoded:
    seen = value.get("observation")
    if not isinstance(seen, dict):
        raise DecodeError("observation must be a map with states, images, task_descriptions.")
    state, rows = _states(seen.get("states"))
    images: list[ImageData] = []
    for key in IMAGE_KEYS:
        if seen.get(key) is not None:
            images += _images(key, seen[key], rows)
            rows = rows or images[-1].shape[0]
    tasks = _tasks(seen.get("task_descriptions"), rows)
    rows = rows or len(tasks)
    if not rows:
        raise DecodeError("observation must have states, images or task_descriptions.")
    metadata = _metadata(value.get("metadata"), rows)
    request = InferRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        images=tuple(images),
        state=state,
        instructions=tasks,
        horizon=_horizon(value.get("requested_action_horizon")),
        extensions={"metadata": metadata} if metadata else {},
    )
    return Decoded(request, False, rows)


def _states(found: Any) -> tuple[TensorData | None, int]:
    if found is None:
        return None, 0
    if not isinstance(found, Array) or found.code not in _FORMS or len(found.shape) != 2:
        raise DecodeError("states must be a float array [B, D].")
    if not 0 < found.shape[0] <= MAX_BATCH or found.size > MAX_STATE_CELLS:
        raise DecodeError(f"states must have 1 to {MAX_BATCH} rows; got {found.shape[0]}.")
    return TensorData(_float32(found), found.shape, "float32"), found.shape[0]


def _float32(found: Array) -> memoryview:
    """Return the elements in float32; refuses what is not finite there."""
    data = found.row_major()
    values = struct.unpack(f"<{found.size}{_FORMS[found.code]}", data)
    largest = 3.4028235677973366e38  # half a step above the largest float32: rounds to infinity
    if not all(math.isfinite(value) and abs(value) < largest for value in values):
        raise DecodeError("states must be finite in float32; got NaN, infinity or a larger number.")
    if found.code == "f4":
        return data
    return memoryview(struct.pack(f"<{found.size}f", *values))


def _images(key: str, found: Any, rows: int) -> list[ImageData]:
    if not isinstance(found, Array) or found.code != "u1" or len(found.shape) not in (4, 5):
        raise DecodeError(f"{key} must be a uint8 array [B, H, W, 3], [B, 3, H, W] or [B, N, ...].")
    if (rows and found.shape[0] != rows) or not 0 < found.shape[0] <= MAX_BATCH:
        raise DecodeError(f"{key} must have as many rows as states; got {found.shape[0]}.")
    one = found.shape[-3:]
    layout: Literal["hwc", "chw"] = "hwc" if one[-1] == 3 else "chw"
    if 3 not in (one[0], one[-1]) or 0 in one:
        raise DecodeError(f"{key} must have 3 channels, first or last; got {list(one)}.")
    data = found.row_major()
    if len(found.shape) == 4:
        return [ImageData(key, data, found.shape, layout=layout)]
    batch, views = found.shape[:2]
    if not 0 < views <= MAX_VIEWS:
        raise DecodeError(f"{key} must have 1 to {MAX_VIEWS} views; got {views}.")
    shape = (batch, *one)
    return [
        ImageData(f"{key}.{view}", _view(data, view, batch, views), shape, layout=layout)
        for view in range(views)
    ]


def _view(data: memoryview, view: int, batch: int, views: int) -> memoryview:
    """Return one camera of [B, N, ...]; a copy unless there is only one row."""
    size = data.nbytes // (batch * views)
    if batch == 1:
        return data[view * size : (view + 1) * size]
    rows = (data[(row * views + view) * size :][:size] for row in range(batch))
    return memoryview(b"".join(rows))


def _tasks(found: Any, rows: int) -> tuple[str, ...]:
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise DecodeError("task_descriptions must be a list of texts.")
    if rows and len(found) != rows:
        raise DecodeError(f"task_descriptions must have {rows} entries; got {len(found)}.")
    return tuple(found)


def _metadata(found: Any, rows: int) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise DecodeError("metadata must be a map.")
    size = found.get("batch_size")
    if size is not None and (type(size) is not int or size != rows):
        raise DecodeError(f"metadata.batch_size must be the observation's {rows} rows.")
    plain: dict[str, Any] = _plain(found)
    return plain


def _horizon(found: Any) -> int:
    if found is None:
        return 0
    if type(found) is not int or not 0 <= found <= MAX_HORIZON:
        raise DecodeError("requested_action_horizon must be an integer from 0 to 4294967295.")
    return found


# ---------------------------------------------------------------- envelope


def _envelope(value: Mapping[str, Any], model: str) -> InferRequest:
    parts = {key: value.get(key) or {} for key in ("input", "parameters", "runtime")}
    for key, part in parts.items():
        if not isinstance(part, dict):
            raise DecodeError(f"{key} must be a map; got {type(part).__name__}.")
    given = dict(parts["input"])
    seen = given.get("observation")
    arrays = {name: item for name, item in given.items() if isinstance(item, Array)}
    if isinstance(seen, dict):
        inside = {name: item for name, item in seen.items() if isinstance(item, Array)}
        if set(inside) & set(arrays):
            raise DecodeError("arrays of input and input.observation must have different names.")
        arrays |= inside
        given["observation"] = {k: v for k, v in seen.items() if k not in inside}
    rest = {key: item for key, item in given.items() if key not in arrays}
    if not all(isinstance(name, str) for name in arrays):
        raise DecodeError("names of arrays must be texts.")
    return InferRequest(
        request_id=uuid.uuid4().hex,
        model=model,
        horizon=_horizon(value.get("requested_action_horizon")),
        inputs={name: _tensor(name, array) for name, array in arrays.items()},
        extensions=_plain(
            {"input": rest, "parameters": parts["parameters"], "runtime": parts["runtime"]}
        ),
    )


def _tensor(name: str, found: Array) -> TensorData:
    if found.code not in _DTYPES:
        raise DecodeError(f"array {name!r:.80} must be of {', '.join(_DTYPES)}; got {found.code}.")
    return TensorData(found.row_major(), found.shape, _DTYPES[found.code])


def _plain(value: Any) -> Any:
    """Return JSON values; arrays and bytes have no place in them."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise DecodeError("names in a map must be texts.")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise DecodeError("numbers must be finite; got NaN or infinity.")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DecodeError(f"values must be texts, numbers, lists or maps; got {type(value).__name__}.")


def check(request: InferRequest, contract: ModelContract) -> None:
    """Compare with what the model takes; raises DecodeError naming expected and received."""
    known = set(contract.cameras)
    # Stacked views come as NAME.0, NAME.1; the model server knows how many it wants.
    odd = sorted(i.name for i in request.images if not {i.name, i.name.rpartition(".")[0]} & known)
    if known and odd:
        raise DecodeError(f"cameras must be of {', '.join(sorted(known))}; got {', '.join(odd)}.")
    if request.state is not None and contract.state_dim:
        got = request.state.shape[-1]
        if got != contract.state_dim:
            raise DecodeError(f"states must have {contract.state_dim} values a row; got {got}.")
    if contract.horizon and request.horizon > contract.horizon:
        raise DecodeError(
            f"requested_action_horizon must be at most {contract.horizon}; got {request.horizon}."
        )


# ---------------------------------------------------------------- replies


def encode(reply: InferReply, decoded: Decoded, envelope: Envelope) -> bytes:
    """Return the answer's body; raises ValueError for a reply without actions."""
    actions = _actions(reply)
    if not decoded.envelope:
        shape = actions.shape if len(actions.shape) == 3 else (1, *actions.shape)
        if len(shape) != 3 or shape[0] != decoded.rows:
            raise ValueError("actions have another number of rows than the observation")
        return pack_openpi({"actions": make_array(_NAMES[actions.dtype], shape, actions.data)})
    if envelope == "batched" or len(actions.shape) < 3:
        return pack_openpi({"data": [{"action": _record(actions)}]})
    size = actions.nbytes // max(actions.shape[0], 1)
    data = memoryview(actions.data)
    rows = []
    for row in range(actions.shape[0]):
        part = TensorData(data[row * size :][:size], actions.shape[1:], actions.dtype)
        rows.append({"input_index": row, "action": _record(part)})
    return pack_openpi({"data": rows})


def _record(actions: TensorData) -> dict[str, Any]:
    values = make_array(_NAMES[actions.dtype], actions.shape, actions.data)
    return {"values": values, "shape": list(actions.shape), "dtype": actions.dtype}


def _actions(reply: InferReply) -> TensorData:
    found = reply.actions
    if found is None and len(reply.outputs) == 1:
        (found,) = reply.outputs.values()
    found = found or reply.outputs.get("actions") or reply.outputs.get("output")
    if found is None or found.dtype not in _NAMES:
        raise ValueError("reply has no actions")
    return found
