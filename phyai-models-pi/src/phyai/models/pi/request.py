"""Turns checked rows into a Prepared batch: shapes and values, camera slots, key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.pi.config import LIMITS, PiConfig
from phyai.models.pi.rtc_inputs import rtc_inputs
from phyai.request_values import check_steps
from phyai.types import Key, Prepared, RTCOptions

MAX_STEPS = LIMITS["num_inference_steps"]
"""Tables over steps take about 0.5 MB per step at the released size."""


def token_buckets(longest: int) -> tuple[int, ...]:
    """Return the prompt buckets of a model whose prompt holds at most ``longest`` tokens."""
    return (*(size for size in (16, 48, 112) if size < longest), longest)


def assemble(
    config: PiConfig,
    *,
    images: Tensor,
    image_mask: Tensor,
    tokens: Tensor,
    token_len: Tensor,
    noise: Tensor,
    state: Tensor | None,
    num_steps: int | None,
    rtc: Sequence[RTCOptions | None],
    meta: tuple[Any, ...] | None,
) -> Prepared:
    """Return the Prepared batch of checked rows.

    images [B, C, 3, S, S] float32 in [-1, 1]; image_mask [B, C] bool; tokens [B, n] int64 right
    padded; token_len [B]; noise [B, T, A] float32; state [B, max_state_dim] float32 (pi0).
    """
    rows = images.shape[0]
    images, image_mask = _valid_cameras_first(images, image_mask)
    longest = int(token_len.max())
    bucket = next(
        (size for size in token_buckets(tokens.shape[1]) if size >= longest), tokens.shape[1]
    )
    tensors: dict[str, Tensor] = {
        "images": images,
        "image_mask": image_mask,
        "tokens": tokens[:, :bucket].contiguous(),
        "token_len": token_len,
        "noise.action": noise,
    }
    if state is not None:
        tensors["state"] = state
    mode, extra = rtc_inputs(config, rtc)
    tensors.update(extra)
    key = Key(
        num_steps=check_steps(num_steps, config.num_inference_steps, MAX_STEPS),
        buckets=(("cameras", images.shape[1]), ("tokens", bucket)),
        rtc=mode,
    )
    return Prepared(tensors, rows, key, meta)


def _valid_cameras_first(images: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's valid cameras to the front and drop slots no row uses.

    Order among valid cameras is kept; a masked camera has no token, so moving it changes nothing.
    """
    if not bool(mask.any(dim=1).all()):
        row = int((~mask.any(dim=1)).nonzero()[0])
        raise RequestError(
            f"row {row} must have at least one camera image; got none. Send an image."
        )
    used = int(mask.sum(dim=1).max())
    if bool(mask[:, :used].all()):
        return images[:, :used].contiguous(), mask[:, :used].contiguous()
    order = torch.argsort((~mask).to(torch.int8), dim=1, stable=True)[:, :used]
    picked = torch.stack([images[row, order[row]] for row in range(images.shape[0])])
    return picked, mask.gather(1, order)
