"""Splits a model request into checked rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phyai.adapter import check_rows, draw_noise
from phyai.errors import RequestError
from phyai.models.gr00t.args import GrootArgs
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.request import Grid, GrootRequest, HostRow
from phyai.models.gr00t.rtc_inputs import RtcStart, official_starts, rtc_start
from phyai.request_values import checked, host_tensor
from phyai.rtc_options import rtc_per_row


def request_rows(config: GrootConfig, args: GrootArgs, request: GrootRequest) -> list[HostRow]:
    """Return the rows of a model request; what ``assemble`` checks is not checked here.

    Raises: RequestError.
    """
    ids = checked("input_ids", request.input_ids, (None, None), torch.int64)
    rows = ids.shape[0]
    check_rows(rows, args.max_batch_size)
    valid = _valid(request, ids)
    tokens = [row[mask] for row, mask in zip(ids, valid, strict=True)]
    if not all(row.numel() for row in tokens):
        raise RequestError("attention_mask must leave at least one token in every row; got none.")
    history, width = config.state_history_length, config.max_state_dim
    state = checked("state", request.state, (rows, history, width)).flatten(1)
    embodiment = checked("embodiment_id", request.embodiment_id, (rows,), torch.int64)
    shape = (rows, config.action_horizon, config.max_action_dim)
    noise = (
        draw_noise(shape, request.seed)
        if request.noise is None
        else checked("noise", request.noise, shape)
    )
    images = _images(config, request, tokens)
    rtc = _rtc(config, args, request, rows)
    return [
        HostRow(tokens[i], *images[i], state[i], int(embodiment[i]), noise[i], rtc[i])
        for i in range(rows)
    ]


def _valid(request: GrootRequest, ids: Tensor) -> Tensor:
    """Return which tokens are no padding, bool [B, S]."""
    if request.attention_mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    mask = host_tensor("attention_mask", request.attention_mask)
    if mask.dtype == torch.bool:
        mask = mask.long()
    mask = checked("attention_mask", mask, tuple(ids.shape), torch.int64)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise RequestError("attention_mask must hold 0 and 1 only; got other values.")
    return mask == 1


def _images(
    config: GrootConfig, request: GrootRequest, tokens: list[Tensor]
) -> list[tuple[tuple[Grid, ...], Tensor]]:
    """Return each row's image grids and patches."""
    values = (None, config.patch_values)
    pixels = checked("pixel_values", request.pixel_values, values)
    table = checked("image_grid_thw", request.image_grid_thw, (None, 3), torch.int64)
    if bool((table < 1).any()):
        raise RequestError("image_grid_thw must be positive; got a size below 1.")
    grids: list[Grid] = [(t, h, w) for t, h, w in table.tolist()]
    counts = _counts(config, request, tokens, grids)
    found: list[tuple[tuple[Grid, ...], Tensor]] = []
    image_at = patch_at = 0
    for count in counts:
        mine = tuple(grids[image_at : image_at + count])
        patches = sum(t * h * w for t, h, w in mine)
        found.append((mine, pixels[patch_at : patch_at + patches]))
        image_at, patch_at = image_at + count, patch_at + patches
    if patch_at != len(pixels):
        raise RequestError(
            f"pixel_values must hold the {patch_at} patches of image_grid_thw; got {len(pixels)}."
        )
    return found


def _counts(
    config: GrootConfig, request: GrootRequest, tokens: list[Tensor], grids: list[Grid]
) -> list[int]:
    """Return the images of each row: as the request says, or as its image tokens ask for."""
    if request.images_per_row is not None:
        given: Any = request.images_per_row
        counts = checked("images_per_row", given, (len(tokens),), torch.int64).tolist()
        if min(counts) < 0 or sum(counts) != len(grids):
            raise RequestError(
                f"images_per_row must hold {len(tokens)} numbers that add up to the "
                f"{len(grids)} images; got {counts!r}."
            )
        return counts
    counts, at = [], 0
    for row in tokens:
        wanted, first = int((row == config.image_token_id).sum()), at
        while wanted > 0 and at < len(grids):
            frames, height, width = grids[at]
            wanted -= frames * height * width // config.merge
            at += 1
        counts.append(at - first)
    if at != len(grids):
        raise RequestError(
            f"image_grid_thw must be the images of the rows' image tokens; got {len(grids)} "
            f"images, and tokens for {at}. Send images_per_row or expand the placeholders."
        )
    return counts


def _rtc(
    config: GrootConfig, args: GrootArgs, request: GrootRequest, rows: int
) -> list[RtcStart | None]:
    horizon, width = config.action_horizon, config.max_action_dim
    if request.prev_actions is None and request.rtc_options is None:
        return [
            None if row is None else rtc_start(row, horizon, width, args.rtc_ramp_rate)
            for row in rtc_per_row(request.rtc, rows)
        ]
    if request.rtc is not None or request.prev_actions is None:
        raise RequestError(
            "real-time chunking must be asked for in one form: rtc, or prev_actions with "
            "rtc_options; got parts of both or no prev_actions."
        )
    prev: Any = checked("prev_actions", request.prev_actions, (rows, None, width))
    return official_starts(prev, request.rtc_options, horizon, args.rtc_ramp_rate)
