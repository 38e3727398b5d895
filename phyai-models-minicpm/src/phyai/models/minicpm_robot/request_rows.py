"""Splits a model request into checked rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import check_rows, draw_noise
from phyai.errors import RequestError
from phyai.models.minicpm_robot.args import MiniCPMRobotArgs
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.request import Grid, HostRow, MiniCPMRobotRequest
from phyai.request_values import checked, host_tensor

PROMPT = ("input_ids", "pixel_values", "target_sizes")
INT32 = 2**31


def request_rows(
    config: MiniCPMRobotConfig, args: MiniCPMRobotArgs, request: MiniCPMRobotRequest, default: int
) -> list[HostRow]:
    """Return the rows of a model request; what ``assemble`` checks is not checked here.

    default: embodiment id of a request that names none.
    Raises: RequestError.
    """
    parts = _features(config, request) if request.vl_embs is not None else _prompts(config, request)
    rows = len(parts)
    check_rows(rows, args.max_batch_size)
    head = config.head
    state = _state(config, request.state, rows)
    embodiment = _embodiments(request.embodiment_id, rows, default)
    shape = (rows, head.action_horizon, head.action_dim)
    noise = (
        draw_noise(shape, request.seed)
        if request.noise is None
        else checked("noise", request.noise, shape)
    )
    return [
        HostRow(*part[:3], state[i], embodiment[i], noise[i], part[3])
        for i, part in enumerate(parts)
    ]


Part = tuple[Tensor, tuple[Grid, ...], Tensor, "Tensor | None"]
"""Tokens, grids, patches and features of one row."""


def _features(config: MiniCPMRobotConfig, request: MiniCPMRobotRequest) -> list[Part]:
    given = [name for name in PROMPT if getattr(request, name) is not None]
    if given or request.images_per_row is not None:
        raise RequestError(
            "vl_embs replaces tokens and images, so these must be left out; got also "
            f"{', '.join(given) or 'images_per_row'}."
        )
    width = config.head.cross_attention_dim
    features = checked("vl_embs", request.vl_embs, (None, None, width))
    valid = _valid(request, tuple(features.shape[:2]))
    nothing = torch.zeros(0, dtype=torch.int64)
    pixels = features.new_zeros(0, config.patch_values)
    return [(nothing, (), pixels, row[mask]) for row, mask in zip(features, valid, strict=True)]


def _prompts(config: MiniCPMRobotConfig, request: MiniCPMRobotRequest) -> list[Part]:
    absent = [name for name in PROMPT if getattr(request, name) is None]
    if absent == ["pixel_values", "target_sizes"]:  # a prompt without any image
        request = _without_images(config, request)
    elif absent:
        raise RequestError(
            "a request must hold input_ids, pixel_values and target_sizes, or vl_embs; got no "
            f"{' and no '.join(absent)}."
        )
    ids = checked("input_ids", request.input_ids, (None, None), torch.int64)
    valid = _valid(request, tuple(ids.shape))
    tokens = [row[mask] for row, mask in zip(ids, valid, strict=True)]
    images = _images(config, request, tokens)
    return [(row, *image, None) for row, image in zip(tokens, images, strict=True)]


def _without_images(
    config: MiniCPMRobotConfig, request: MiniCPMRobotRequest
) -> MiniCPMRobotRequest:
    vision = config.vision
    strip = torch.zeros(1, vision.num_channels, vision.patch_size, 0)
    return replace(request, pixel_values=strip, target_sizes=torch.zeros(0, 2, dtype=torch.int64))


def _valid(request: MiniCPMRobotRequest, shape: tuple[int, ...]) -> Tensor:
    """Return which tokens are no padding, bool [B, S]."""
    if request.attention_mask is None:
        valid = torch.ones(shape, dtype=torch.bool)
    else:
        mask = host_tensor("attention_mask", request.attention_mask)
        if mask.dtype == torch.bool:
            mask = mask.long()
        mask = checked("attention_mask", mask, shape, torch.int64)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise RequestError("attention_mask must hold 0 and 1 only; got other values.")
        valid = mask == 1
    if not bool(valid.any(dim=1).all()):
        raise RequestError("every row must have at least one token; got a row without. Send some.")
    return valid


def _images(
    config: MiniCPMRobotConfig, request: MiniCPMRobotRequest, tokens: list[Tensor]
) -> list[tuple[tuple[Grid, ...], Tensor]]:
    """Return each row's image grids and patches."""
    pixels = patches_of(config, request.pixel_values)
    table = checked("target_sizes", request.target_sizes, (None, 2), torch.int64)
    if bool((table < 1).any()) or bool((table >= INT32).any()):
        raise RequestError("target_sizes must be positive sizes; got one that is not.")
    grids: list[Grid] = [(h, w) for h, w in table.tolist()]
    counts = _counts(config, request, tokens, grids)
    found: list[tuple[tuple[Grid, ...], Tensor]] = []
    image_at = patch_at = 0
    for count in counts:
        mine = tuple(grids[image_at : image_at + count])
        patches = sum(h * w for h, w in mine)
        found.append((mine, pixels[patch_at : patch_at + patches]))
        image_at, patch_at = image_at + count, patch_at + patches
    if patch_at != len(pixels):
        raise RequestError(
            f"pixel_values must hold the {patch_at} patches of target_sizes; got {len(pixels)}."
        )
    return found


def patches_of(config: MiniCPMRobotConfig, strip: Any) -> Tensor:
    """Return the patches [N, C * p * p] of a strip [1, C, p, p * N].  Raises: RequestError."""
    channels, side = config.vision.num_channels, config.vision.patch_size
    strip = checked("pixel_values", strip, (1, channels, side, None))
    if strip.shape[3] % side:
        raise RequestError(
            f"pixel_values must be a strip of patches {side} wide; got {strip.shape[3]} columns."
        )
    count = strip.shape[3] // side
    patches: Tensor = strip[0].view(channels, side, count, side).permute(2, 0, 1, 3)
    return patches.reshape(count, config.patch_values)


def _counts(
    config: MiniCPMRobotConfig,
    request: MiniCPMRobotRequest,
    tokens: list[Tensor],
    grids: list[Grid],
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
            wanted -= config.image_tokens(*grids[at])
            at += 1
        counts.append(at - first)
    if at != len(grids):
        raise RequestError(
            f"target_sizes must be the images of the rows' image tokens; got {len(grids)} "
            f"images, and tokens for {at}. Send images_per_row or expand the placeholders."
        )
    return counts


def _state(config: MiniCPMRobotConfig, given: Any, rows: int) -> Tensor:
    """Return the states [B, D]; zeros when the request has none, as official servers do."""
    width = config.head.state_dim
    if given is None:
        return torch.zeros(rows, width)
    state = host_tensor("state", given)
    if state.dim() == 3:
        return checked("state", state, (rows, 1, width)).flatten(1)
    return checked("state", state, (rows, width))


def _embodiments(given: Any, rows: int, default: int) -> list[int]:
    if given is None:
        return [default] * rows
    ids = host_tensor("embodiment_id", given)
    if ids.dim() == 0:
        ids = ids.expand(rows)
    found: list[int] = checked("embodiment_id", ids, (rows,), torch.int64).tolist()
    return found
