"""Requests of MiniCPM-RobotTrack: the preprocessed form, and checked rows as a Prepared batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import check_rows
from phyai.errors import RequestError
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.request_values import checked
from phyai.types import Key, Prepared

FIRST_BUCKET = 16


@dataclass(frozen=True)
class MiniCPMRobotTrackRequest:
    """A model request: everything already preprocessed, every window whole. It has no session.

    input_ids: int64 [B, T].  attention_mask: int64 [B, T], 0 for padding, which is left out;
        None = no padding.
    coarse_tokens: float [B, history * coarse, C]: features of every history slot, oldest first, the
        current frame's among them.  fine_tokens: float [B, fine, C] of the current frame.
    coarse_time_indices: int64 [B, history * coarse], equal within a frame; None = 0, 1, ...
    fine_time_indices: int64 [B, fine], all equal; None = the number of history frames.
    Result: float32 [B, waypoints, 3]: x and y in metres, yaw in radians.

    >>> import torch
    >>> from phyai.models.minicpm_robot_track import MiniCPMRobotTrackRequest
    >>> coarse, fine = torch.zeros(1, 124, 1536), torch.zeros(1, 64, 1536)
    >>> MiniCPMRobotTrackRequest(torch.tensor([[1, 5, 7]]), coarse, fine).attention_mask is None
    True
    """

    input_ids: Tensor
    coarse_tokens: Tensor
    fine_tokens: Tensor
    coarse_time_indices: Tensor | None = None
    fine_time_indices: Tensor | None = None
    attention_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HostRow:
    """One checked row.

    tokens int64 [S]; frames uint8 [N, 3, side, side], or features: coarse float32 [N, c, C] of all
    new frames and fine float32 [f, C] of the newest; times int64 [history + 1].

    >>> HostRow(torch.tensor([1, 5]), torch.arange(32), coarse=torch.zeros(3, 4, 1536)).count
    3
    """

    tokens: Tensor
    times: Tensor
    frames: Tensor | None = None
    coarse: Tensor | None = None
    fine: Tensor | None = None

    @property
    def count(self) -> int:
        """How many new frames it has."""
        source = self.frames if self.frames is not None else self.coarse
        assert source is not None
        return len(source)


def slot_times(config: MiniCPMRobotTrackConfig) -> Tensor:
    """Return the time indices of the history slots and the current frame, int64 [history + 1]."""
    return torch.arange(config.history_frames + 1)


def request_rows(
    config: MiniCPMRobotTrackConfig, max_rows: int, request: MiniCPMRobotTrackRequest
) -> list[HostRow]:
    """Return the rows of a model request.  Raises: RequestError."""
    ids = checked("input_ids", request.input_ids, (None, None), torch.int64)
    rows, length = ids.shape
    check_rows(rows, max_rows)
    mask = torch.ones_like(ids)
    if request.attention_mask is not None:
        mask = checked("attention_mask", request.attention_mask, (rows, length), torch.int64)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise RequestError("attention_mask must hold 0 and 1; got other values. Correct it.")
    frames, coarse_count = config.history_frames, config.coarse_tokens_per_frame
    fine_count, features = config.fine_tokens_current_frame, config.vision_feature_dim
    coarse = checked(
        "coarse_tokens", request.coarse_tokens, (rows, frames * coarse_count, features)
    )
    fine = checked("fine_tokens", request.fine_tokens, (rows, fine_count, features))
    past = _times(
        "coarse_time_indices", request.coarse_time_indices, (rows, frames, coarse_count), config, 0
    )
    now = _times(
        "fine_time_indices", request.fine_time_indices, (rows, 1, fine_count), config, frames
    )
    if bool((past[:, 1:] == past[:, :-1]).any()):
        raise RequestError(
            "coarse_time_indices must differ between neighbouring frames; got equal ones. Number "
            "the frames of the window."
        )
    times = torch.cat([past, now], dim=1)
    coarse = coarse.view(rows, frames, coarse_count, features)
    return [
        HostRow(ids[i][mask[i] == 1], times[i], coarse=coarse[i], fine=fine[i]) for i in range(rows)
    ]


def _times(
    name: str, value: Any, shape: tuple[int, int, int], config: MiniCPMRobotTrackConfig, first: int
) -> Tensor:
    """Return the time index of every frame, int64 [B, frames]; None counts from ``first``."""
    rows, frames, tokens = shape
    if value is None:
        return (first + torch.arange(frames)).expand(rows, -1)
    times = checked(name, value, (rows, frames * tokens), torch.int64).view(shape)
    if bool((times != times[..., :1]).any()):
        raise RequestError(
            f"{name} must be equal for the {tokens} tokens of one frame; got several. Keep a "
            "frame's tokens side by side."
        )
    if times.numel() and not 0 <= int(times.min()) <= int(times.max()) < config.max_time_steps:
        raise RequestError(
            f"{name} must be in [0, {config.max_time_steps}); got [{int(times.min())}, "
            f"{int(times.max())}]. Number the frames within the window."
        )
    return times[..., 0]


def assemble(
    config: MiniCPMRobotTrackConfig,
    rows: Sequence[HostRow],
    *,
    max_text: int,
    meta: tuple[Any, ...] | None = None,
    session_ids: tuple[str | None, ...] | None = None,
    seqs: tuple[int | None, ...] | None = None,
) -> Prepared:
    """Return the Prepared batch of rows.  Raises: RequestError for rows that do not fit."""
    for i, row in enumerate(rows):
        _check_tokens(config, row.tokens, max_text, f"row {i}: " if len(rows) > 1 else "")
    pixels = rows[0].frames is not None
    if any((row.frames is not None) is not pixels for row in rows):
        raise RequestError(
            "rows of a request must all hold images, or all hold features; got both. Send them as "
            "two requests."
        )
    text = min(_bucket(max(len(row.tokens) for row in rows), FIRST_BUCKET), max_text)
    frames = min(_bucket(max(row.count for row in rows), 1), config.kept_frames)
    tensors: dict[str, Tensor] = {
        "token_ids": torch.stack([_padded(row.tokens, text) for row in rows]),
        "token_len": torch.tensor([len(row.tokens) for row in rows]),
        "frame_len": torch.tensor([row.count for row in rows]),
        "times": torch.stack([row.times for row in rows]),
    }
    if pixels:
        tensors["frames"] = torch.stack([_padded(_given(row.frames), frames) for row in rows])
    else:
        tensors["coarse"] = torch.stack([_padded(_given(row.coarse), frames) for row in rows])
        tensors["fine"] = torch.stack([_given(row.fine) for row in rows])
    kept = session_ids is not None and any(name is not None for name in session_ids)
    extra = (("pixels", pixels), ("session", kept))
    key = Key(buckets=(("text", text), ("frames", frames)), extra=extra)
    return Prepared(tensors, len(rows), key, meta, session_ids, seqs)


def _check_tokens(
    config: MiniCPMRobotTrackConfig, tokens: Tensor, max_text: int, where: str
) -> None:
    if not 1 <= len(tokens) <= max_text:
        raise RequestError(
            f"{where}the instruction must have 1 to {max_text} tokens; got {len(tokens)}. Shorten "
            "it or raise max_text_tokens."
        )
    vocab = config.backbone.vocab_size
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
        raise RequestError(
            f"{where}input_ids must be in [0, {vocab}); got [{int(tokens.min())}, "
            f"{int(tokens.max())}]. Check the tokenizer."
        )


def _bucket(count: int, least: int) -> int:
    """Return the next power of two, at least ``least``.

    >>> [_bucket(n, 16) for n in (3, 17, 32)]
    [16, 32, 32]
    """
    return max(least, 1 << max(count - 1, 0).bit_length())


def _given(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _padded(values: Tensor, length: int) -> Tensor:
    """Return ``values`` with zeros behind, ``length`` entries along the first dim."""
    out = values.new_zeros(length, *values.shape[1:])
    out[: len(values)] = values
    return out
