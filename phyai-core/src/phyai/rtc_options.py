"""What adapters check of option ``rtc``: its form, one per row, the left-over's numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import is_integer
from phyai.errors import RequestError
from phyai.request_values import host_tensor
from phyai.types import RTCOptions


def as_rtc(value: Any) -> RTCOptions | None:
    """Return option ``rtc`` as RTCOptions; a mapping with the same fields is accepted."""
    if value is None:
        return None
    if isinstance(value, RTCOptions):
        if value.prev_chunk is None:
            return None
        if value.space not in ("model", "robot"):
            raise RequestError(f"rtc space must be 'model' or 'robot'; got {value.space!r}.")
        return value
    try:
        options = RTCOptions(**dict(value))
    except (TypeError, ValueError) as error:
        raise RequestError(
            "option rtc must be RTCOptions or a mapping of its fields (prev_chunk, "
            f"inference_delay, execution_horizon, ...); got {value!r}."
        ) from error
    return as_rtc(options)


def rtc_per_row(
    rtc: RTCOptions | Mapping[str, Any] | Sequence[RTCOptions | None] | None, rows: int
) -> list[RTCOptions | None]:
    """Return one RTCOptions (or None) per row of a model request, whose chunks are model space.

    rtc: one for all rows, with prev_chunk [T, A] or [rows, T, A], or a sequence of one per row.
    """
    if rtc is None or isinstance(rtc, (RTCOptions, Mapping)):
        options = as_rtc(rtc)
        per_row: list[RTCOptions | None] = [options] * rows
        if options is not None and (prev := _numbers(options.prev_chunk)).ndim == 3:
            if prev.shape[0] != rows:
                raise RequestError(
                    f"rtc prev_chunk expected shape [T, A] or [{rows}, T, A]; "
                    f"got {list(prev.shape)}."
                )
            per_row = [replace(options, prev_chunk=chunk) for chunk in prev]
    elif isinstance(rtc, Sequence) and not isinstance(rtc, str):
        per_row = [as_rtc(row) for row in rtc]
        if len(per_row) != rows:
            raise RequestError(f"rtc must hold one entry per row ({rows}); got {len(per_row)}.")
    else:
        raise RequestError(
            f"rtc must be RTCOptions, or a sequence of them or None; got {type(rtc).__name__}."
        )
    if any(row is not None and row.space != "model" for row in per_row):
        raise RequestError(
            "rtc prev_chunk of a model request must be in model space; got space='robot'. "
            "Send an Observation, or ActionChunk.model_actions."
        )
    return per_row


def left_over(row: RTCOptions) -> Tensor:
    """Return the checked left-over of a row: finite float32 [T, A] with T >= 1."""
    chunk = _numbers(row.prev_chunk)
    if chunk.ndim != 2 or not chunk.numel():
        raise RequestError(
            "rtc prev_chunk expected shape [T, A] with T >= 1 and A >= 1; got "
            f"{list(chunk.shape)}. Leave rtc out when nothing is left."
        )
    if not bool(torch.isfinite(chunk).all()):
        raise RequestError("rtc prev_chunk must be finite; got NaN or infinity.")
    return chunk


def rtc_count(name: str, value: Any, default: int, least: int) -> int:
    """Return a whole number of the options; None = ``default``.  Raises: RequestError."""
    if value is None:
        return default
    if not is_integer(value) or value < least:
        raise RequestError(f"rtc {name} must be an integer >= {least}; got {value!r}.")
    return int(value)


def _numbers(value: Any) -> Tensor:
    found = host_tensor("rtc prev_chunk", value)
    if found.is_complex() or found.dtype == torch.bool:
        raise RequestError(
            f"rtc prev_chunk must be real numbers; got {str(found.dtype).removeprefix('torch.')}."
        )
    return found.to(torch.float32)
