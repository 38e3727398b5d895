"""Splits a Cosmos3ActionRequest into checked rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.cosmos3.args import CheckpointArgs
from phyai.models.cosmos3.batch import HostRow, Known
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.media_rows import ActionRows, media_rows
from phyai.models.cosmos3.processing.actions import MAX_CHUNK, Mode, check_mode, known_actions
from phyai.models.cosmos3.processing.checks import check_integer
from phyai.models.cosmos3.processing.domains import domain_of
from phyai.models.cosmos3.request import Cosmos3ActionRequest
from phyai.models.cosmos3.request_rows import count_rows, latent_indexes, video_shape_of
from phyai.request_values import checked, host_tensor


def policy_rows(
    request: Cosmos3ActionRequest,
    config: Cosmos3Config,
    args: CheckpointArgs,
    scale: tuple[int, int],
) -> list[HostRow]:
    """Return the rows of a request.  scale: pixels of a latent along time and along a side.

    Raises: RequestError.
    """
    rows, mode = count_rows(request, args), check_mode(request.mode)
    if request.action_dim not in (None, config.action_dim):
        raise RequestError(
            f"action_dim must be {config.action_dim}, as the checkpoint's; got "
            f"{request.action_dim!r}. Leave it out."
        )
    chunk = check_integer("action_chunk", request.action_chunk, 1, MAX_CHUNK)
    raw = check_integer("raw_action_dim", request.raw_action_dim, 1, config.action_dim)
    start = check_integer("action_start_frame_offset", request.action_start_frame_offset, -64, 64)
    whole = mode == "inverse_dynamics"
    return media_rows(
        request,
        config,
        args,
        scale,
        latents=request.cond_video_latents,
        pixels=request.cond_video_pixels,
        usual=range(video_shape_of(request, config)[0]) if whole else (0,),
        actions=ActionRows(
            chunk,
            _known_actions(request, mode, rows, chunk, raw, config.action_dim),
            _domains(request.domain_id, rows, config.num_embodiment_domains, raw),
            start,
            raw,
        ),
    )


def _known_actions(
    request: Cosmos3ActionRequest, mode: Mode, rows: int, chunk: int, raw: int, width: int
) -> list[Known]:
    """Return each row's mask and values [chunk, width]; unused channels are known zeros."""
    indexes = request.cond_action_indexes
    if indexes is None:
        indexes = range(chunk) if mode == "forward_dynamics" else ()
    clean = latent_indexes(indexes, chunk, "cond_action_indexes")
    if clean:
        given = _given_actions(request, rows, clean, chunk, raw, width)
        mask, values = known_actions(chunk, raw, width, clean, given)
        return [(mask, value) for value in values]
    if request.cond_action is not None:
        raise RequestError(
            f"cond_action must come with cond_action_indexes in mode {mode}; got none. Name the "
            "rows that are given."
        )
    return [known_actions(chunk, raw, width)] * rows


def _given_actions(
    request: Cosmos3ActionRequest,
    rows: int,
    clean: tuple[int, ...],
    chunk: int,
    raw: int,
    width: int,
) -> Tensor:
    """Return the given rows [B, given, raw or width]."""
    if request.cond_action is None:
        raise RequestError(
            f"cond_action must be given for rows {list(clean)}; got none. Send them in model units."
        )
    given = checked("cond_action", request.cond_action, (rows, None, None))
    if given.shape[2] not in (raw, width) or given.shape[1] not in (len(clean), chunk):
        raise RequestError(
            f"cond_action must have {len(clean)} or {chunk} rows of {raw} or {width} channels; got "
            f"{list(given.shape[1:])}. Send the rows that cond_action_indexes names."
        )
    return given if given.shape[1] == len(clean) else given[:, list(clean)]


def _domains(value: Any, rows: int, count: int, raw: int) -> list[int]:
    """Return the domain id of every row, from one id or one per row."""
    ids = host_tensor("domain_id", value)
    ids = ids.expand(rows) if ids.ndim == 0 else ids
    if tuple(ids.shape) != (rows,):
        raise RequestError(
            f"domain_id must be one id, or one for each row ({rows}); got shape "
            f"{list(ids.shape)}. Send one id for all rows."
        )
    found = checked("domain_id", ids, (rows,), torch.int64).tolist()
    return [domain_of(int(one), count, raw).id for one in found]
