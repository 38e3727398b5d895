"""Requests of GR00T: the preprocessed form, and how checked rows become a Prepared batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.gr00t.config import LIMITS, GrootConfig
from phyai.models.gr00t.rtc_inputs import RtcStart, rtc_tensors
from phyai.request_values import check_steps
from phyai.types import Key, Prepared, RTCOptions

MAX_STEPS = LIMITS["num_inference_timesteps"]
"""Tables over steps take about 1 MB per step at the released size."""
MAX_IMAGES = 64
MAX_IMAGE_TOKENS = 16384
"""Per row, far above any robot's cameras: a request that asks for more means harm."""
FIRST_BUCKET = 16

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class GrootRequest:
    """A model request: everything already preprocessed.

    pixel_values: float [N, values per patch]: the patches of all images, row after row.
    image_grid_thw: int64 [images, 3], patches of each image along time, height and width.
    input_ids: int64 [B, S], image tokens included.  attention_mask: int64 [B, S], 0 for padding,
        usually on the left; None = no padding.
    state: float [B, history, max_state_dim], normalised and padded.  embodiment_id: int64 [B].
    noise: float [B, T, A], None = fresh (from ``seed`` when given).
    images_per_row: None = as the image tokens of each row say.
    rtc: one RTCOptions for all rows (prev_chunk [T, A] or [B, T, A]) or one per row. Or the
        official form, prev_actions float [B, T_prev, A] with rtc_options.
    Result: float32 [B, T, A] in model space.

    >>> import torch
    >>> from phyai.models.gr00t import GrootRequest
    >>> ids, grid = torch.tensor([[1, 151655, 2]]), torch.tensor([[1, 2, 2]])
    >>> pixels, state = torch.zeros(4, 1536), torch.zeros(1, 1, 132)
    >>> GrootRequest(pixels, grid, ids, state, embodiment_id=torch.tensor([2])).num_steps is None
    True
    """

    pixel_values: Tensor
    image_grid_thw: Tensor
    input_ids: Tensor
    state: Tensor
    embodiment_id: Tensor
    attention_mask: Tensor | None = None
    noise: Tensor | None = None
    num_steps: int | None = None
    seed: int | None = None
    images_per_row: Sequence[int] | None = None
    rtc: RTCOptions | Sequence[RTCOptions | None] | None = None
    prev_actions: Tensor | None = None
    rtc_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class HostRow:
    """One checked row.

    tokens int64 [S] without padding; grids of its images; pixels float32 [N, values];
    state float32 [history * max_state_dim]; noise float32 [T, A].
    """

    tokens: Tensor
    grids: tuple[Grid, ...]
    pixels: Tensor
    state: Tensor
    embodiment: int
    noise: Tensor
    rtc: RtcStart | None = None


def assemble(
    config: GrootConfig,
    rows: Sequence[HostRow],
    *,
    num_steps: int | None,
    padded: int,
    max_text: int,
    meta: tuple[Any, ...] | None,
) -> Prepared:
    """Return the Prepared batch of rows.

    padded: length official padding pads to, 0 = off.  max_text: most text tokens of a row.
    Raises: RequestError for rows that do not fit the checkpoint.
    """
    for i, row in enumerate(rows):
        check_row(config, row, max_text, f"row {i}: " if len(rows) > 1 else "")
    images = max(len(row.grids) for row in rows)
    patches = max(len(row.pixels) for row in rows)
    text = max(len(row.tokens) - len(row.pixels) // config.merge for row in rows)
    bucket = padded or text_bucket(text)
    tokens = padded or bucket + patches // config.merge
    one_image = max(t * h * w for row in rows for t, h, w in row.grids)
    tensors: dict[str, Tensor] = {
        "pixels": torch.stack([_padded(row.pixels, patches) for row in rows]),
        "grids": torch.stack([_padded(torch.tensor(row.grids), images) for row in rows]),
        "tokens": torch.stack([_padded(row.tokens, tokens) for row in rows]),
        "token_len": torch.tensor([len(row.tokens) for row in rows]),
        "state": torch.stack([row.state for row in rows]),
        "embodiment": torch.tensor([row.embodiment for row in rows]),
        "noise.action": torch.stack([row.noise for row in rows]),
    }
    rtc = rtc_tensors([row.rtc for row in rows], config.action_horizon, config.max_action_dim)
    extra: list[tuple[str, Any]] = [("rtc", True)] if rtc else []
    same = all(t * h * w == one_image for row in rows for t, h, w in row.grids)
    if same and all(len(row.grids) == images for row in rows):
        extra += [("even", True)]  # no image has to be padded or masked
    if padded:  # the padding is seen by the tokens of its row: only requests padded alike may join
        extra += [("padded", padded)]
    key = Key(
        num_steps=check_steps(num_steps, config.num_inference_timesteps, MAX_STEPS),
        buckets=(
            ("images", images),
            ("patches", patches),
            ("image_patches", one_image),
            ("text", bucket),
        ),
        extra=tuple(extra),
    )
    # Official batches show padding to the tokens of their rows: whoever asks for that runs alone.
    return Prepared({**tensors, **rtc}, len(rows), key, meta, joinable=not padded)


def text_bucket(text: int) -> int:
    """Return the bucket of so many text tokens: the next power of two, at least 16.

    >>> [text_bucket(n) for n in (3, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(FIRST_BUCKET, 1 << (text - 1).bit_length())


def check_row(config: GrootConfig, row: HostRow, max_text: int, where: str = "") -> None:
    """Raise RequestError unless a row's tokens, images and embodiment fit the checkpoint."""
    vision, text = config.backbone
    side = vision.spatial_merge_size
    if not 1 <= len(row.grids) <= MAX_IMAGES:
        raise RequestError(
            f"{where}a row must have 1 to {MAX_IMAGES} images; got {len(row.grids)}. "
            "Without image tokens half of the blocks have nothing to attend to."
        )
    for grid in row.grids:
        frames, height, width = grid
        if frames != 1 or height < side or width < side or height % side or width % side:
            raise RequestError(
                f"{where}an image's grid must be one frame of patches whose rows and columns are "
                f"multiples of {side}; got {grid}. Send every frame as an image of its own."
            )
    patches = sum(t * h * w for t, h, w in row.grids)
    if patches != len(row.pixels):
        raise RequestError(
            f"{where}pixel_values must hold the {patches} patches of the image grids; got "
            f"{len(row.pixels)}. Send the patches of every image."
        )
    image_tokens = patches // config.merge
    if image_tokens > MAX_IMAGE_TOKENS:
        raise RequestError(
            f"{where}a row must have at most {MAX_IMAGE_TOKENS} image tokens; got {image_tokens}. "
            "Send smaller images."
        )
    found = int((row.tokens == config.image_token_id).sum())
    if found != image_tokens:
        raise RequestError(
            f"{where}input_ids must hold one image token (id {config.image_token_id}) per "
            f"{config.merge} patches, {image_tokens}; got {found}."
        )
    count = len(row.tokens) - found
    if not 1 <= count <= max_text:
        raise RequestError(
            f"{where}the prompt must have 1 to {max_text} text tokens; got {count}. "
            "Shorten the instruction or raise max_text_tokens."
        )
    if int(row.tokens.min()) < 0 or int(row.tokens.max()) >= text.vocab_size:
        raise RequestError(
            f"{where}input_ids must be in [0, {text.vocab_size}); got [{int(row.tokens.min())}, "
            f"{int(row.tokens.max())}]. Check the tokenizer."
        )
    if not 0 <= row.embodiment < config.max_num_embodiments:
        raise RequestError(
            f"{where}embodiment_id must be in [0, {config.max_num_embodiments}); got "
            f"{row.embodiment}. See the checkpoint's embodiment_id.json."
        )


def _padded(values: Tensor, length: int) -> Tensor:
    """Return ``values`` with zeros behind, ``length`` entries along the first dim."""
    out = values.new_zeros(length, *values.shape[1:])
    out[: len(values)] = values
    return out
