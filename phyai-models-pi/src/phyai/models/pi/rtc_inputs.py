"""Real-time chunking inputs of a request: guided weights, or the trained mode's known prefix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from phyai.adapter import is_integer
from phyai.errors import RequestError
from phyai.models.pi.config import PiConfig, RTCConfig
from phyai.rtc import prefix_weights
from phyai.rtc_options import left_over, rtc_count
from phyai.types import RTCOptions

Mode = Literal["off", "guided", "trained"]


def rtc_inputs(
    config: PiConfig, rows: Sequence[RTCOptions | None]
) -> tuple[Mode, dict[str, Tensor]]:
    """Return the mode all rows share and its tensors; rows without RTC are switched off in them.

    Raises: RequestError for a left-over or delay the checkpoint cannot use.
    """
    modes = {_mode(config, row) for row in rows if row is not None}
    if not modes:
        return "off", {}
    if len(modes) > 1:
        raise RequestError(
            "rtc mode must be equal in all rows of a request; got guided and trained. "
            "Send the rows as separate requests."
        )
    mode = modes.pop()
    batch, chunk, width = len(rows), config.chunk_size, config.max_action_dim
    prev = torch.zeros(batch, chunk, width)
    if mode == "trained":
        mask = torch.zeros(batch, chunk, width, dtype=torch.bool)
        for i, row in enumerate(rows):
            if row is not None:
                rest = _left_over(config, row)
                delay = _trained_delay(config, row, len(rest))
                prev[i, :delay, : rest.shape[1]] = rest[:delay]
                mask[i, :delay] = True
        return mode, {"known.action.mask": mask, "known.action.value": prev}
    weights, largest = torch.zeros(batch, chunk), torch.zeros(batch)
    settings = config.rtc or RTCConfig()
    for i, row in enumerate(rows):
        if row is None:
            continue
        rest = _left_over(config, row)
        used = min(len(rest), chunk)
        prev[i, :used, : rest.shape[1]] = rest[:used]
        horizon = rtc_count(
            "execution_horizon", row.execution_horizon, settings.execution_horizon, 1
        )
        delay = rtc_count("inference_delay", row.inference_delay, 0, 0)
        schedule = row.schedule or settings.prefix_attention_schedule
        weights[i] = prefix_weights(schedule, delay, min(horizon, len(rest)), chunk)
        largest[i] = _max_weight(row.max_guidance_weight, settings.max_guidance_weight)
    return "guided", {"rtc.w": weights, "rtc.prev": prev, "rtc.max": largest}


def _mode(config: PiConfig, row: RTCOptions) -> Mode:
    mode = row.mode or (config.rtc.mode if config.rtc is not None else "guided")
    if mode not in ("guided", "trained"):
        raise RequestError(f"rtc mode must be 'guided' or 'trained'; got {mode!r}.")
    if mode == "trained" and config.rtc_training_max_delay < 1:
        raise RequestError(
            "rtc mode 'trained' needs a checkpoint trained for it (rtc_training_max_delay > 0); "
            "this one is not. Use mode 'guided'."
        )
    return mode


def _left_over(config: PiConfig, row: RTCOptions) -> Tensor:
    chunk = left_over(row)
    if chunk.shape[1] > config.max_action_dim:
        raise RequestError(
            f"rtc prev_chunk must have at most {config.max_action_dim} action dims; "
            f"got {chunk.shape[1]}."
        )
    return chunk


def _trained_delay(config: PiConfig, row: RTCOptions, length: int) -> int:
    delay = rtc_count("inference_delay", row.inference_delay, 0, 0)
    limit = min(config.rtc_training_max_delay, config.chunk_size - 1)
    if delay > limit:
        raise RequestError(
            f"rtc inference_delay must be at most {limit} for this checkpoint; got {delay}. "
            "Infer earlier or use mode 'guided'."
        )
    if delay > length:
        raise RequestError(
            f"rtc prev_chunk must hold at least inference_delay={delay} rows; got {length}."
        )
    return delay


def _max_weight(value: Any, default: float) -> float:
    if value is None:
        return default
    number = is_integer(value) or isinstance(value, (float, np.floating))
    if not number or not 0 < value < math.inf:
        raise RequestError(f"rtc max_guidance_weight must be a finite number > 0; got {value!r}.")
    return float(value)
