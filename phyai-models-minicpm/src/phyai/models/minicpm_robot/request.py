"""Requests of MiniCPM-Robot: the preprocessed form, and how checked rows become a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.minicpm_robot.config import LIMITS, MiniCPMRobotConfig
from phyai.request_values import check_steps
from phyai.types import Key, Prepared

MAX_STEPS = LIMITS["num_inference_timesteps"]
MAX_IMAGES = 64
MAX_IMAGE_TOKENS = 16384
"""Per row, far above any robot's cameras: a request that asks for more means harm."""
FIRST_BUCKET = 16

Grid = tuple[int, int]


@dataclass(frozen=True)
class MiniCPMRobotRequest:
    """A model request: everything already preprocessed.

    input_ids: int64 [B, S], image tokens included.  attention_mask: int64 [B, S], 0 for padding on
        either side; None = no padding.
    pixel_values: float [1, 3, 14, 14 * N], the strip of all images' patches, row after row.
    target_sizes: int [images, 2], rows and columns of patches of each image. Both None = prompts
        without images.
    vl_embs: float [B, S, W] instead of the three above: the decoder's output, for the head alone;
        ``attention_mask`` says which of its tokens count.
    state: float [B, D] or [B, 1, D].  noise: float [B, H, A], None = fresh (from ``seed`` when
        given).
    embodiment_id: one int, or int64 [B]; None = the adapter's default.
    images_per_row: None = as the image tokens of each row say.
    Result: float32 [B, H, A], the unified layout.

    >>> import torch
    >>> from phyai.models.minicpm_robot import MiniCPMRobotRequest
    >>> ids, grid = torch.tensor([[1, 248056, 2]]), torch.tensor([[4, 4]])
    >>> pixels, state = torch.zeros(1, 3, 14, 14 * 16), torch.zeros(1, 80)
    >>> MiniCPMRobotRequest(ids, pixels, grid, state, embodiment_id=4).num_steps is None
    True
    """

    input_ids: Tensor | None = None
    pixel_values: Tensor | None = None
    target_sizes: Tensor | None = None
    state: Tensor | None = None
    attention_mask: Tensor | None = None
    noise: Tensor | None = None
    embodiment_id: Tensor | int | None = None
    num_steps: int | None = None
    seed: int | None = None
    images_per_row: Sequence[int] | None = None
    vl_embs: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HostRow:
    """One checked row.

    tokens int64 [S] without padding; grids of its images; pixels float32 [N, C * p * p]: patches,
    row-major; state float32 [D]; noise float32 [H, A].
    features float32 [S, W]: instead of tokens and images.

    >>> none = torch.zeros(0)
    >>> HostRow(none, (), none, torch.zeros(80), 0, none, features=torch.zeros(7, 64)).length
    7
    """

    tokens: Tensor
    grids: tuple[Grid, ...]
    pixels: Tensor
    state: Tensor
    embodiment: int
    noise: Tensor
    features: Tensor | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) if self.features is None else len(self.features)


def assemble(
    config: MiniCPMRobotConfig,
    rows: Sequence[HostRow],
    *,
    num_steps: int | None,
    max_text: int,
    meta: tuple[Any, ...] | None,
) -> Prepared:
    """Return the Prepared batch of rows.

    num_steps: None = the checkpoint's.  max_text: most text tokens of a row.
    Raises: RequestError for rows that do not fit the checkpoint.
    """
    for i, row in enumerate(rows):
        check_row(config, row, max_text, f"row {i}: " if len(rows) > 1 else "")
    own = {
        "token_len": torch.tensor([row.length for row in rows]),
        "state": torch.stack([row.state for row in rows]),
        # A shared head ignores ids, so they may be any integers, also ones no tensor can hold.
        "embodiment": torch.tensor(
            [0 if config.head.shared_head else row.embodiment for row in rows]
        ),
        "noise.action": torch.stack([row.noise for row in rows]),
    }
    alone = rows[0].features is not None
    more, buckets, extra = _features(rows) if alone else _prompts(config, rows)
    key = Key(
        num_steps=check_steps(num_steps, config.head.num_inference_timesteps, MAX_STEPS),
        buckets=buckets,
        extra=extra,
    )
    return Prepared({**own, **more}, len(rows), key, meta)


Part = tuple[dict[str, Tensor], tuple[tuple[str, int], ...], tuple[tuple[str, Any], ...]]


def _features(rows: Sequence[HostRow]) -> Part:
    """Return tensors, buckets and key extras of rows that come with the decoder's output."""
    bucket = text_bucket(max(row.length for row in rows))
    features = [_padded(row.features, bucket) for row in rows if row.features is not None]
    return {"features": torch.stack(features)}, (("text", bucket),), (("features", True),)


def _prompts(config: MiniCPMRobotConfig, rows: Sequence[HostRow]) -> Part:
    """Return tensors, buckets and key extras of rows with tokens and images."""
    images = max(len(row.grids) for row in rows)
    patches = max(len(row.pixels) for row in rows)
    one_image = max((h * w for row in rows for h, w in row.grids), default=0)
    bucket = max(text_bucket(_text_tokens(config, row)) for row in rows)
    tokens = bucket + patches // config.merge**2
    tensors = {
        "pixels": torch.stack([_padded(row.pixels, patches) for row in rows]),
        "grids": torch.stack([_padded(_table(row.grids), images) for row in rows]),
        "tokens": torch.stack([_padded(row.tokens, tokens) for row in rows]),
    }
    same = all(h * w == one_image for row in rows for h, w in row.grids)
    even = images > 0 and same and all(len(row.grids) == images for row in rows)
    buckets = (
        ("images", images),
        ("patches", patches),
        ("image_patches", one_image),
        ("text", bucket),
    )
    return tensors, buckets, (("even", True),) if even else ()


def text_bucket(text: int) -> int:
    """Return the bucket of so many text tokens: 16, 24, 32, 48, 64, 96, ... whatever comes next.

    >>> [text_bucket(n) for n in (3, 17, 33, 100, 150)]
    [16, 24, 48, 128, 192]
    """
    whole = max(FIRST_BUCKET, 1 << (text - 1).bit_length())
    less = whole * 3 // 4
    return less if FIRST_BUCKET < less >= text else whole


def check_row(config: MiniCPMRobotConfig, row: HostRow, max_text: int, where: str = "") -> None:
    """Raise RequestError unless a row's tokens, images and embodiment fit the checkpoint."""
    banks = config.head.max_num_embodiments
    if not config.head.shared_head and not 0 <= row.embodiment < banks:
        raise RequestError(
            f"{where}embodiment_id must be in [0, {banks}); got {row.embodiment}. "
            "See the checkpoint's page for the id of your robot."
        )
    if row.features is not None:
        most = max_text + MAX_IMAGE_TOKENS
        if not 1 <= row.length <= most:
            raise RequestError(
                f"{where}vl_embs must have 1 to {most} tokens in a row; got {row.length}."
            )
        return
    _check_images(config, row, where)
    found = int((row.tokens == config.image_token_id).sum())
    wanted = sum(config.image_tokens(h, w) for h, w in row.grids)
    if found != wanted:
        raise RequestError(
            f"{where}input_ids must hold one image token (id {config.image_token_id}) per "
            f"{config.merge**2} patches, {wanted}; got {found}. Expand the image placeholders."
        )
    count = len(row.tokens) - found
    if not 1 <= count <= max_text:
        raise RequestError(
            f"{where}the prompt must have 1 to {max_text} text tokens; got {count}. "
            "Shorten the instruction or raise max_text_tokens."
        )
    low, high = int(row.tokens.min()), int(row.tokens.max())
    if low < 0 or high >= config.text.vocab_size:
        raise RequestError(
            f"{where}input_ids must be in [0, {config.text.vocab_size}); got [{low}, {high}]. "
            "Check the tokenizer."
        )


def _check_images(config: MiniCPMRobotConfig, row: HostRow, where: str) -> None:
    side = config.merge
    if len(row.grids) > MAX_IMAGES:
        raise RequestError(
            f"{where}a row must have at most {MAX_IMAGES} images; got {len(row.grids)}."
        )
    for height, width in row.grids:
        if height < side or width < side or height % side or width % side:
            raise RequestError(
                f"{where}an image's rows and columns of patches must be multiples of {side}; got "
                f"{height} x {width}. Resize the image to {config.image_size} x "
                f"{config.image_size} pixels."
            )
    patches = sum(h * w for h, w in row.grids)
    if patches != len(row.pixels):
        raise RequestError(
            f"{where}pixel_values must hold the {patches} patches of target_sizes; got "
            f"{len(row.pixels)}. Send the patches of every image."
        )
    if patches // side**2 > MAX_IMAGE_TOKENS:
        raise RequestError(
            f"{where}a row must have at most {MAX_IMAGE_TOKENS} image tokens; got "
            f"{patches // side**2}. Send smaller images."
        )


def _text_tokens(config: MiniCPMRobotConfig, row: HostRow) -> int:
    return int((row.tokens != config.image_token_id).sum())


def _table(grids: Sequence[Grid]) -> Tensor:
    return torch.tensor(grids, dtype=torch.int64).view(-1, 2)


def _padded(values: Tensor, length: int) -> Tensor:
    """Return ``values`` with zeros behind, ``length`` entries along the first dim."""
    out = values.new_zeros(length, *values.shape[1:])
    out[: len(values)] = values
    return out
