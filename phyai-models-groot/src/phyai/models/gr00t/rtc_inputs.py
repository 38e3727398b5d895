"""Real-time chunking of GR00T: a start taken from the previous chunk, and a velocity ramp.

The first ``overlap`` steps of a new chunk start from the previous chunk instead of noise; the
first ``frozen`` of them do not move, the others the more the further they are from those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import is_integer
from phyai.errors import RequestError
from phyai.rtc_options import left_over, rtc_count
from phyai.types import RTCOptions

MODE = "ramp"
"""Name of this form of RTC; a request may say it or leave the mode out."""
OFFICIAL_OPTIONS = (
    "action_horizon",
    "rtc_overlap_steps",
    "rtc_frozen_steps",
    "rtc_ramp_rate",
)


@dataclass(frozen=True, slots=True)
class RtcStart:
    """RTC of one row.

    prev: float32 [overlap, A], model space, where the new chunk starts.  frozen: steps that keep
    it.  rate: of the ramp behind them.
    """

    prev: Tensor
    frozen: int
    rate: float


def velocity_ramp(horizon: int, overlap: int, frozen: int, rate: float) -> Tensor:
    """Return how much of its velocity each step of a chunk gets, float32 [horizon].

    0 for frozen steps, 1 behind the overlap, between them (1 - e^(-rate t)) / (1 - e^(-rate)) with
    t = j / (overlap - frozen + 1), j = 1, 2, ...

    >>> velocity_ramp(4, 2, 1, 6.0).tolist()[0::2]
    [0.0, 1.0]
    """
    ramp = torch.ones(horizon)
    ramp[:frozen] = 0.0
    count = overlap - frozen
    t = torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)
    ramp[frozen:overlap] = (torch.expm1(-rate * t) / math.expm1(-rate)).float()
    return ramp


def rtc_tensors(rows: Sequence[RtcStart | None], horizon: int, width: int) -> dict[str, Tensor]:
    """Return the inputs of a batch; none when RTC is off in all rows.

    ``rtc.start`` [B, T, A] and ``rtc.overlap`` bool [B, T]: where x starts from it; ``rtc.ramp``
    [B, T]: the velocity's factor.
    """
    if all(row is None for row in rows):
        return {}
    start = torch.zeros(len(rows), horizon, width)
    overlap = torch.zeros(len(rows), horizon, dtype=torch.bool)
    ramp = torch.ones(len(rows), horizon)
    for i, row in enumerate(rows):
        if row is not None:
            count = len(row.prev)
            start[i, :count, : row.prev.shape[1]] = row.prev
            overlap[i, :count] = True
            ramp[i] = velocity_ramp(horizon, count, row.frozen, row.rate)
    return {"rtc.start": start, "rtc.overlap": overlap, "rtc.ramp": ramp}


def rtc_start(options: RTCOptions, horizon: int, width: int, rate: float) -> RtcStart:
    """Return what a left-over in model space means for the new chunk.

    Its first rows are the new chunk's first rows: ``execution_horizon`` of them overlap (None =
    all), ``inference_delay`` of those are frozen.
    Raises: RequestError for a left-over or counts that cannot be used, and for settings of other
        forms of RTC.
    """
    foreign = ["schedule", "max_guidance_weight"] + ["mode"] * (options.mode != MODE)
    for name in foreign:
        if getattr(options, name) is not None:
            raise RequestError(
                f"rtc {name} must be left out: this model has its own form of RTC, a velocity "
                f"ramp (mode {MODE!r}); got {getattr(options, name)!r}."
            )
    chunk = left_over(options)
    if chunk.shape[1] > width:
        raise RequestError(
            f"rtc prev_chunk must have at most {width} action dims; got {chunk.shape[1]}."
        )
    most = min(len(chunk), horizon)
    overlap = min(rtc_count("execution_horizon", options.execution_horizon, most, 1), most)
    frozen = min(rtc_count("inference_delay", options.inference_delay, 0, 0), overlap)
    return RtcStart(chunk[:overlap], frozen, rate)


# ---------------------------------------------------------------- the official options


def official_starts(
    prev: Tensor, options: Mapping[str, Any] | None, horizon: int, rate: float
) -> list[RtcStart | None]:
    """Return the official form: a whole previous chunk, whose tail is where the new one starts.

    prev: finite float32 [B, T, A].  options: ``action_horizon`` (steps of prev that count),
    ``rtc_overlap_steps``, ``rtc_frozen_steps`` and optionally ``rtc_ramp_rate``.
    Raises: RequestError for options that are missing, unknown or do not fit.
    """
    if options is not None and not isinstance(options, Mapping):
        raise RequestError(
            f"rtc_options must be a mapping of {', '.join(OFFICIAL_OPTIONS)}; got "
            f"{type(options).__name__}. Send a mapping."
        )
    given = dict(options or {})
    unknown = sorted(str(name) for name in given.keys() - set(OFFICIAL_OPTIONS))
    absent = [name for name in OFFICIAL_OPTIONS[:3] if name not in given]
    if unknown or absent:
        raise RequestError(
            f"rtc_options must hold {', '.join(OFFICIAL_OPTIONS)}; got "
            f"{'unknown ' + ', '.join(unknown) if unknown else 'no ' + ', '.join(absent)}."
        )
    length = _bounded("action_horizon", given, 1, prev.shape[1], "the steps of prev_actions")
    overlap = _bounded("rtc_overlap_steps", given, 1, min(length, horizon), "the shorter chunk")
    frozen = _bounded("rtc_frozen_steps", given, 0, overlap, "rtc_overlap_steps")
    rate = given.get("rtc_ramp_rate", rate)
    number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if not number or not 0 < rate < math.inf:
        raise RequestError(f"rtc_ramp_rate must be a finite number > 0; got {rate!r}.")
    return [RtcStart(row[length - overlap : length], frozen, float(rate)) for row in prev]


def _bounded(name: str, given: Mapping[str, Any], least: int, most: int, limit: str) -> int:
    value = given[name]
    if not is_integer(value) or not least <= value <= most:
        raise RequestError(
            f"{name} must be an integer in [{least}, {most}], {limit}; got {value!r}."
        )
    return int(value)
