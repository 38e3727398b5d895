"""GR00T's observations and actions, nested or flat, one row or a batch.

Nested: ``video``, ``state`` and ``language`` maps; [B, T, H, W, 3], [B, T, D], list[B] of list[T].
Flat: ``video.KEY``, ``state.KEY`` and a text key; the oldest clients send them without B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import Array, make_array, pack_float32
from phyai_gateway.decode.limits import MAX_CAMERAS, MAX_TEXT_BYTES
from phyai_gateway.messages import Bytes, Fault, ImageData, InferRequest, TensorData
from phyai_gateway.protocols import observation as checks
from phyai_gateway.protocols.gr00t_modality import Modality

_NESTED = ("video", "state", "language")


@dataclass(frozen=True, slots=True)
class Parts:
    """An observation by modality. nested: the form it came in, and its reply goes out in."""

    video: Mapping[str, Any]
    state: Mapping[str, Any]
    language: Mapping[str, Any]
    nested: bool


def split(found: Mapping[Any, Any]) -> Parts:
    """Return an observation by modality. Raises: Fault for another form."""
    if any(isinstance(found.get(name), Mapping) for name in _NESTED):
        video, state, language = (found.get(name, {}) for name in _NESTED)
        if not all(isinstance(group, Mapping) for group in (video, state, language)):
            raise checks.invalid("video, state and language of an observation must be maps.")
        return Parts(video, state, language, nested=True)
    flat: dict[str, dict[str, Any]] = {name: {} for name in _NESTED}
    for key, value in found.items():
        group, _, name = key.partition(".") if isinstance(key, str) else ("", "", "")
        if group in ("video", "state") and name:
            flat[group][name] = value
        elif group in ("annotation", "task", "language"):
            flat["language"][key] = value
    if not any(flat.values()):
        raise checks.invalid(
            "observation must hold video, state and language, or video.KEY, state.KEY and a text; "
            f"got {checks.names(str(key) for key in found)}."
        )
    return Parts(flat["video"], flat["state"], flat["language"], nested=False)


@dataclass(frozen=True, slots=True)
class Observed:
    """A request and the number of rows it asks for."""

    request: InferRequest
    rows: int


def request_of(
    parts: Parts,
    contract: ModelContract,
    request_id: str,
    *,
    batched: bool,
    max_prompt_bytes: int = MAX_TEXT_BYTES,
) -> Observed:
    """Return the request of one observation.

    batched: arrays have a leading batch dim. Raises: Fault naming what the model needs.
    """
    modality = Modality.of(contract)
    images = _images(parts.video, modality, contract, batched)
    checks.check_cameras([image.name for image in images], contract)
    state, state_rows = _state(parts.state, modality, contract, batched)
    texts = _texts(parts.language, modality, max_prompt_bytes)
    counts = {image.shape[0] for image in images} | ({state_rows} if state_rows else set())
    counts |= {len(texts)} if texts and (batched or len(texts) > 1) else set()
    if len(counts) > 1:
        raise checks.invalid(f"rows of a batch must agree; got {sorted(counts)}.")
    rows = counts.pop() if counts else 1
    if not 1 <= rows <= contract.max_rows:
        raise checks.invalid(f"batch must have 1 to {contract.max_rows} rows; got {rows}.")
    texts = [checks.prompt(text, contract, max_prompt_bytes) for text in texts or [None]]
    if len({text is None for text in texts}) > 1:
        raise checks.invalid("every row must have a text, or none.")
    one, steps = rows == 1, len(modality.frames)
    shown = tuple(
        ImageData(image.name, image.data, image.shape[1:] if one and steps == 1 else image.shape)
        for image in images
    )
    request = InferRequest(
        request_id,
        contract.name,
        images=shown,
        state=None if state is None else _rows_of(state, one),
        instruction=texts[0] if one else None,
        instructions=() if one else tuple(text or "" for text in texts),
    )
    return Observed(request, rows)


def actions_of(
    actions: TensorData, modality: Modality, *, nested: bool, batched: bool
) -> dict[str, Array]:
    """Return actions float32 [B, H, A] by key, [B, H, D] or without B.

    Raises: Fault ``data_loss`` when the widths of the keys don't add up.
    """
    rows, horizon, width = actions.shape
    widths = dict(modality.actions)
    if len(widths) == 1 and not next(iter(widths.values())):
        widths = dict.fromkeys(widths, width)
    if sum(widths.values()) != width:
        raise Fault("data_loss", f"actions must have {sum(widths.values())} values; got {width}.")
    data, start, out = memoryview(actions.data).cast("B"), 0, {}
    for key, size in widths.items():
        cells: Bytes = data
        if size != width:
            cells = b"".join(
                data[(row * width + start) * 4 : (row * width + start + size) * 4]
                for row in range(rows * horizon)
            )
        shape = (rows, horizon, size) if batched else (horizon, size)
        out[key if nested else f"action.{key}"] = make_array("<f4", shape, cells)
        start += size
    return out


# ---------------------------------------------------------------- parts


def _images(
    found: Mapping[str, Any], modality: Modality, contract: ModelContract, batched: bool
) -> list[ImageData]:
    known = modality.cameras or tuple(found)
    if len(known) > MAX_CAMERAS:
        raise checks.invalid(f"at most {MAX_CAMERAS} cameras may be sent; got {len(known)}.")
    if not all(isinstance(name, str) for name in known):
        raise checks.invalid("names of video must be text.")
    steps = len(modality.frames)
    return [_image(name, found[name], contract, steps, batched) for name in known if name in found]


def _image(
    name: str, value: object, contract: ModelContract, steps: int, batched: bool
) -> ImageData:
    """Return [B, H, W, 3], or [B, T, H, W, 3] of a model that looks at several frames."""
    form = f"[B, {steps}, H, W, 3]" if batched else f"[{steps}, H, W, 3]"
    if not isinstance(value, Array) or value.code != "u1":
        got = value.dtype if isinstance(value, Array) else type(value).__name__
        raise checks.invalid(f"video {name!r} must be uint8 {form}; got {got}.")
    shape = value.shape if batched else (1, *value.shape)
    if len(shape) != 5 or shape[4] != 3 or shape[1] != steps:
        raise checks.invalid(f"video {name!r} must be uint8 {form}; got {list(value.shape)}.")
    checks.check_size(name, shape[2:], contract)
    kept = shape if steps > 1 else (shape[0], *shape[2:])
    return ImageData(name, value.row_major(), kept)


def _state(
    found: Mapping[str, Any], modality: Modality, contract: ModelContract, batched: bool
) -> tuple[TensorData | None, int]:
    """Return float32 [B, D], all keys side by side in the model's order, and B."""
    missing = [key for key in modality.state if key not in found]
    if missing:
        raise checks.invalid(
            f"model {contract.name!r} needs the states {checks.names(missing)}; got "
            f"{checks.names(str(key) for key in found)}."
        )
    rows: list[list[float]] = []
    for key in modality.state or found:
        part = _state_rows(key, found[key], modality.state.get(key, 0), batched)
        if rows and len(part) != len(rows):
            raise checks.invalid(f"rows of state {key!r} must be {len(rows)}; got {len(part)}.")
        rows = [left + right for left, right in zip(rows, part, strict=True)] if rows else part
    width = len(rows[0]) if rows else 0
    if contract.state_dim and width != contract.state_dim:
        raise checks.invalid(
            f"state of model {contract.name!r} must have {contract.state_dim} values; got {width}."
        )
    if not width:
        return None, 0
    packed = pack_float32((value for row in rows for value in row), "state")
    return TensorData(packed, (len(rows), width), "float32"), len(rows)


def _state_rows(key: str, value: object, width: int, batched: bool) -> list[list[float]]:
    form = f"[B, 1, {width or 'D'}]" if batched else f"[1, {width or 'D'}]"
    shape = value.shape if isinstance(value, Array) else ()
    shape = shape if batched else (1, *shape)
    wrong = len(shape) != 3 or shape[1] != 1 or (width and shape[2] != width)
    if not isinstance(value, Array) or wrong:
        got = list(value.shape) if isinstance(value, Array) else type(value).__name__
        raise checks.invalid(f"state {key!r} must be float32 {form}; got {got}.")
    flat, size = value.floats(), shape[2]
    return [flat[row * size : (row + 1) * size] for row in range(shape[0])]


def _texts(found: Mapping[str, Any], modality: Modality, max_bytes: int) -> list[Any]:
    """Return one text per row; a single entry is taken under any key, since checkpoints differ."""
    key = modality.language
    if key not in found and len(found) == 1:
        key = next(iter(found))
    value = found.get(key)
    if value is None:
        return []
    rows = value if isinstance(value, list) else [value]
    return [row[0] if isinstance(row, list) and len(row) == 1 else row for row in rows]


def _rows_of(state: TensorData, one: bool) -> TensorData:
    return TensorData(state.data, state.shape[1:], "float32") if one else state
