"""Checks what a robot sent: camera frames and state, by the modalities of its embodiment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError, did_you_mean
from phyai.models.gr00t.processing.images import MAX_ASPECT, MAX_SIDE, Pixels
from phyai.models.gr00t.processing.modality import Modality
from phyai.models.gr00t.processing.poses import Array
from phyai.request_values import host_tensor

_RANGE_SLACK = 1e-5  # float images may overshoot [0, 1] by rounding


def camera_frames(images: Any, video: Modality) -> dict[str, list[Pixels]]:
    """Return the frames of every camera, uint8 [height, width, 3] each, oldest first.

    images: camera -> uint8 [height, width, 3] or float in [0, 1] of that shape or channels first;
        with a leading time axis when the embodiment sees more than one frame.
    Raises: RequestError naming the camera.
    """
    if not isinstance(images, Mapping):
        raise RequestError(
            f"images must be a mapping of camera name to image; got {type(images).__name__}. "
            f"Send {', '.join(video.keys)}."
        )
    for name in images:
        if name not in video.keys:
            raise RequestError(
                f"camera must be one of {', '.join(video.keys)}; got {name!r}."
                f"{did_you_mean(str(name), video.keys)} Rename it."
            )
    absent = [name for name in video.keys if name not in images]
    if absent:
        raise RequestError(
            f"images must hold every camera of this embodiment ({', '.join(video.keys)}); got no "
            f"{', '.join(absent)}. Send all of them."
        )
    return {name: _frames(name, images[name], video) for name in video.keys}


def _frames(camera: str, value: Any, video: Modality) -> list[Pixels]:
    array = _array(f"image of camera {camera!r}", value)
    floating = array.dtype.kind == "f"
    if array.dtype != np.uint8 and not floating:
        raise RequestError(
            f"image of camera {camera!r} must be uint8, or float in [0, 1]; got dtype "
            f"{array.dtype}. Convert it."
        )
    if array.ndim == 3 and video.steps == 1:
        array = array[None]
    if array.ndim != 4 or len(array) != video.steps:
        raise RequestError(
            f"image of camera {camera!r} must be {_wanted(video)}; got shape {list(array.shape)}. "
            "Keep the frames it needs and send them oldest first."
        )
    if array.shape[-1] != 3 and array.shape[1] == 3:
        if not floating:
            raise RequestError(
                f"image of camera {camera!r} must have its channels last when it is uint8; got "
                f"{list(array.shape)}. Move the channel axis to the end."
            )
        array = np.moveaxis(array, 1, -1)
    if array.shape[-1] != 3:
        raise RequestError(
            f"image of camera {camera!r} must be RGB, {_wanted(video)}; got shape "
            f"{list(array.shape)}. Send images without alpha."
        )
    _check_size(camera, array.shape[1], array.shape[2])
    pixels = _levels(camera, array) if floating else array
    return [np.ascontiguousarray(frame) for frame in pixels]


def _wanted(video: Modality) -> str:
    if video.steps == 1:
        return "[height, width, 3]"
    return (
        f"[{video.steps}, height, width, 3], the frames at control steps "
        f"{list(video.delta_indices)}"
    )


def _check_size(camera: str, height: int, width: int) -> None:
    short, long = sorted((height, width))
    if short < 2 or long > MAX_SIDE or long > MAX_ASPECT * short:
        raise RequestError(
            f"image of camera {camera!r} must have sides in [2, {MAX_SIDE}], one at most "
            f"{MAX_ASPECT} times the other; got {height} x {width}. Check the camera."
        )


def _levels(camera: str, array: Array) -> Pixels:
    """Return float images in [0, 1] as the nearest levels of uint8."""
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise RequestError(
            f"image of camera {camera!r} must be finite; got NaN or infinity. Check the camera."
        )
    if low < -_RANGE_SLACK or high > 1.0 + _RANGE_SLACK:
        raise RequestError(
            f"float image of camera {camera!r} must lie in [0, 1]; got [{low:g}, {high:g}]. "
            "Send uint8, or divide by 255."
        )
    levels = np.rint(np.clip(array, 0.0, 1.0).astype(np.float64) * 255.0)
    return np.asarray(levels, dtype=np.uint8)


def state_parts(
    state: Any, modality: Modality, widths: Mapping[str, int]
) -> dict[str, NDArray[np.float32]]:
    """Return the raw state by key, float32 [steps, width].

    state: all keys side by side in order, [D], or a mapping key -> values; [steps, D] when the
        embodiment looks at more than one step.
    Raises: RequestError.
    """
    layout = ", ".join(f"{key} ({width})" for key, width in widths.items())
    if state is None:
        raise RequestError(f"state must be sent; got none. Send {layout}.")
    if isinstance(state, Mapping):
        _check_keys(state, layout, tuple(widths))
        return {
            key: _values(f"state {key!r}", state[key], modality, width, f"{width} values")
            for key, width in widths.items()
        }
    total = sum(widths.values())
    flat = _values("state", state, modality, total, f"{total} values: {layout}")
    ends = np.cumsum(list(widths.values()))
    return dict(zip(widths, np.split(flat, ends[:-1], axis=1), strict=True))


def _check_keys(state: Mapping[str, Any], layout: str, keys: tuple[str, ...]) -> None:
    for key in state:
        if key not in keys:
            raise RequestError(
                f"state keys must be {layout}; got {key!r}.{did_you_mean(str(key), keys)} "
                "Rename it."
            )
    absent = [key for key in keys if key not in state]
    if absent:
        raise RequestError(f"state must hold {layout}; got no {', '.join(absent)}. Send all keys.")


def _values(
    name: str, value: Any, modality: Modality, width: int, wanted: str
) -> NDArray[np.float32]:
    array = _array(name, value)
    if array.dtype.kind not in "fiu":
        raise RequestError(f"{name} must be numbers; got dtype {array.dtype}. Send floats.")
    shape = list(array.shape)
    if array.ndim == 0 and width == 1:
        array = array[None]
    if array.ndim == 1 and modality.steps == 1:
        array = array[None]
    if array.ndim != 2 or array.shape[1] != width:
        steps = "" if modality.steps == 1 else f" for each of {modality.steps} steps"
        raise RequestError(
            f"{name} must have {wanted}{steps}; got shape {shape}. "
            "Send the state the checkpoint was trained on."
        )
    if len(array) != modality.steps:
        raise RequestError(
            f"{name} must have {modality.steps} steps, at control steps "
            f"{list(modality.delta_indices)}; got {len(array)}. Send them oldest first."
        )
    with np.errstate(over="ignore"):  # an overflow is infinite, which is refused below
        out = array.astype(np.float32)
    if not np.isfinite(out).all():
        raise RequestError(
            f"{name} must be finite; got NaN or infinity. Check the robot's sensors."
        )
    return out


def _array(name: str, value: Any) -> Array:
    """Return what a caller calls an array, sharing no memory with it."""
    if isinstance(value, Tensor):
        tensor = host_tensor(name, value)
        value = (tensor.float() if tensor.is_floating_point() else tensor).numpy(force=True)
    try:
        return np.array(value)
    except Exception as error:  # anything an array-like's own conversion raises
        raise RequestError(
            f"{name} must be an array of one shape; got {type(value).__name__} ({error}). "
            "Convert it."
        ) from error
