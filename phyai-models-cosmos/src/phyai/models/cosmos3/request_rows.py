"""Parts of a model request that both plugins have, checked row by row. Host only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.adapter import check_rows, is_integer
from phyai.errors import ConfigError, RequestError, did_you_mean
from phyai.models.cosmos3.args import CheckpointArgs
from phyai.models.cosmos3.batch import Known, Sampling
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.processing.checks import check_fps
from phyai.models.cosmos3.processing.noise import modality_noise
from phyai.models.cosmos3.request import Cosmos3Request
from phyai.models.cosmos3.scheduler_files import SchedulerFile
from phyai.request_values import check_steps, checked, host_tensor
from phyai.unipc import explicit_grid, sigmas_of

MAX_STEPS = 1000
MAX_MEDIA_TOKENS = 1_000_000
MAX_PIXELS = 2**31
MAX_VALUE = 1e4
"""Of noise and latents, which are about 1: far larger ones overflow in the network."""


# ---------------------------------------------------------------- parts of a request


def text_rows(
    ids: Any, mask: Any, *, rows: int | None, vocab: int, most: int, name: str
) -> list[Tensor]:
    """Return each row's ids without padding.

    Raises: RequestError for ids outside the vocabulary, empty rows and rows above ``most``.
    """
    tokens = checked(name, ids, (rows, None), torch.int64)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None:
        given = host_tensor(f"{name} mask", mask)
        given = given.long() if given.dtype == torch.bool else given
        valid = checked(f"{name} mask", given, tuple(tokens.shape), torch.int64) == 1
    found = [row[keep] for row, keep in zip(tokens, valid, strict=True)]
    for row in found:
        if not 1 <= len(row) <= most:
            raise RequestError(
                f"{name} must have 1 to {most} tokens per row; got {len(row)}. Shorten the text "
                "or start with a larger max_text_tokens."
            )
        least, largest = int(row.min()), int(row.max())
        if least < 0 or largest >= vocab:
            raise RequestError(
                f"{name} must be at least 0 and below the vocabulary of {vocab}; got "
                f"{least if least < 0 else largest}. Use the checkpoint's tokenizer."
            )
    return found


def texts(
    request: Cosmos3Request, config: Cosmos3Config, args: CheckpointArgs, scales: Sequence[float]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the ids of every row's two branches; of the unconditional one only where needed."""
    limits = {"vocab": config.vocab_size, "most": args.max_text_tokens}
    rows = len(scales)
    tokens = text_rows(request.text_ids, request.text_mask, rows=rows, name="text_ids", **limits)
    if all(scale == 1.0 for scale in scales):
        return tokens, [None] * rows
    if request.neg_text_ids is None:
        raise RequestError(
            f"neg_text_ids must be given for guidance_scale {max(scales):g}; got none. Send the "
            "ids of the empty or the negative prompt, or guidance_scale 1."
        )
    others = text_rows(
        request.neg_text_ids, request.neg_text_mask, rows=rows, name="neg_text_ids", **limits
    )
    return tokens, list(others)


def count_rows(request: Cosmos3Request, args: CheckpointArgs) -> int:
    """Return the rows of a request.  Raises: RequestError."""
    rows = checked("text_ids", request.text_ids, (None, None), torch.int64).shape[0]
    check_rows(rows, args.max_batch_size)
    return int(rows)


def scales_of(value: Any, rows: int) -> list[float]:
    """Return guidance_scale of every row, from one number or one per row.  Raises: RequestError."""
    given = host_tensor("guidance_scale", value)
    given = given.expand(rows) if given.ndim == 0 else given
    if given.dtype == torch.bool or given.is_complex():
        raise RequestError(f"guidance_scale must be numbers; got {given.dtype}. Send floats.")
    found = checked("guidance_scale", given.float(), (rows,)).tolist()
    if any(not 0.0 <= scale <= 100.0 for scale in found):
        raise RequestError(f"guidance_scale must be in [0, 100]; got {found}. Send 1 to 10.")
    return [float(scale) for scale in found]


def fps_of(request: Cosmos3Request) -> float | None:
    """Return frames per second; None for stills.  Raises: RequestError."""
    return None if request.fps is None else check_fps(request.fps)


def video_shape_of(request: Cosmos3Request, config: Cosmos3Config) -> tuple[int, int, int]:
    """Return the latent's frames, height and width.  Raises: RequestError."""
    shape = request.video_shape
    good = isinstance(shape, (tuple, list)) and len(shape) == 3
    if not good or not all(is_integer(n) and n >= 1 for n in shape or ()):
        raise RequestError(
            "video_shape must be (frames, height, width) of the latent, each at least 1; got "
            f"{shape!r}. Use pixel_to_latent_shape."
        )
    frames, height, width = (int(n) for n in shape or ())
    patch = config.latent_patch_size
    tokens = frames * math.ceil(height / patch) * math.ceil(width / patch)
    if tokens > MAX_MEDIA_TOKENS:
        raise RequestError(
            f"video_shape must give at most {MAX_MEDIA_TOKENS} tokens; got {tokens} from "
            f"{[frames, height, width]}. Ask for fewer frames or a smaller size."
        )
    return frames, height, width


def latent_indexes(indexes: Any, frames: int, name: str = "cond_frame_indexes") -> tuple[int, ...]:
    """Return sorted indexes in [0, frames).  Raises: RequestError."""
    try:
        found = list(indexes)
    except TypeError:
        raise RequestError(
            f"{name} must be a sequence of integers; got {indexes!r}. Send a list."
        ) from None
    if not all(is_integer(i) and 0 <= i < frames for i in found):
        raise RequestError(
            f"{name} must be integers in [0, {frames}); got {found}. Name what the request has."
        )
    return tuple(sorted({int(i) for i in found}))


def known_video(
    latents: Any,
    pixels: Any,
    indexes: tuple[int, ...],
    *,
    rows: int,
    channels: int,
    shape: tuple[int, int, int],
    scale: tuple[int, int],
) -> tuple[list[Known | None], list[Tensor | None]]:
    """Return each row's known video, and the pixels to encode it from.

    scale: pixels of a latent along time and along a side.
    Raises: RequestError for latents or pixels of another shape.
    """
    if not indexes:
        return [None] * rows, [None] * rows
    if latents is not None and pixels is not None:
        raise RequestError(
            "a request must show latents or pixels to start from; got both. Send one of them."
        )
    if latents is None and pixels is None:
        raise RequestError(
            f"latents or pixels must be given for the frames {list(indexes)}; got neither. "
            "Send what the video starts from, or no cond_frame_indexes."
        )
    mask = torch.zeros(channels, *shape, dtype=torch.bool)
    mask[:, list(indexes)] = True
    if latents is not None:
        given = _at_least(latents, max(indexes) + 1, (rows, channels, None, *shape[1:]))
        values = torch.zeros(rows, channels, *shape)
        for index in indexes:
            values[:, :, index] = given[:, :, index]
        return [(mask, value) for value in values], [None] * rows
    clip = _clip(pixels, max(indexes), rows, shape, scale)
    return [(mask, torch.zeros(channels, *shape))] * rows, list(clip)


def _at_least(latents: Any, frames: int, shape: tuple[int | None, ...]) -> Tensor:
    given = moderate("latents", latents, shape)
    if given.shape[2] < frames:
        raise RequestError(
            f"latents must have {frames} frames or more; got {given.shape[2]}. Send the frames "
            "that cond_frame_indexes names."
        )
    return given


def _clip(
    pixels: Any, last: int, rows: int, shape: tuple[int, int, int], scale: tuple[int, int]
) -> Tensor:
    """Return the frames that the latents up to ``last`` are made of, [B, 3, F, H, W]."""
    time, side = scale
    clip = checked("cond_video_pixels", pixels, (rows, 3, None, None, None))
    wanted = 1 + time * last
    frames, height, width = clip.shape[2:]
    if frames < wanted:
        raise RequestError(
            f"cond_video_pixels must have {wanted} frames for latent frame {last}; got {frames}. "
            "Repeat the last frame, or name fewer latent frames."
        )
    if height % side or width % side or height // side < shape[1] or width // side < shape[2]:
        raise RequestError(
            f"cond_video_pixels must be multiples of {side} and at least "
            f"{shape[1] * side} x {shape[2] * side} for video_shape {list(shape)}; got "
            f"{height} x {width}. Put the frames on a canvas."
        )
    if wanted * height * width > MAX_PIXELS:
        raise RequestError(
            f"cond_video_pixels must be at most {MAX_PIXELS} pixels; got "
            f"{wanted} x {height} x {width}. Send smaller frames."
        )
    if float(clip.min()) < -1.01 or float(clip.max()) > 1.01:
        raise RequestError(
            f"cond_video_pixels must be in [-1, 1]; got {float(clip.min()):g} to "
            f"{float(clip.max()):g}. Scale them: levels / 127.5 - 1."
        )
    return clip[:, :, :wanted]


def noise_of(
    request: Cosmos3Request, shapes: Mapping[str, tuple[int, ...]], rows: int
) -> list[dict[str, Tensor]]:
    """Return each row's noise by leaf: given, or drawn for all rows at once from the seed."""
    given = dict(request.noise or {})
    for name in given:
        if name not in shapes:
            raise RequestError(
                f"noise must be of {', '.join(shapes)}; got {name!r}."
                f"{did_you_mean(str(name), shapes)} Name what the request makes."
            )
    own = isinstance(request.noise, RowNoise)
    whole = {}
    for leaf, shape in shapes.items():
        if leaf not in given:
            whole[leaf] = modality_noise((rows, *shape), request.seed)
        elif own:
            whole[leaf] = moderate(f"noise of {leaf}", given[leaf], shape)[None]
        else:
            whole[leaf] = moderate(f"noise of {leaf}", given[leaf], (rows, *shape))
    return [{leaf: noise[i] for leaf, noise in whole.items()} for i in range(rows)]


def moderate(name: str, value: Any, shape: Sequence[int | None]) -> Tensor:
    """Return a checked float32 tensor.  Raises: RequestError, also for values beyond MAX_VALUE."""
    tensor = checked(name, value, shape)
    if tensor.numel() and float(tensor.abs().max()) > MAX_VALUE:
        raise RequestError(
            f"{name} must be in [-{MAX_VALUE:g}, {MAX_VALUE:g}]; got {float(tensor.min()):g} to "
            f"{float(tensor.max()):g}. Normalise them."
        )
    return tensor


class RowNoise(dict[str, Tensor]):
    """Noise of one observation by leaf: without an axis of rows."""


def row_noise(noise: Any, leaf: str) -> RowNoise | None:
    """Return an observation's noise by leaf; an array alone is that of ``leaf``.

    Raises: RequestError.
    """
    if noise is None:
        return None
    given = noise if isinstance(noise, Mapping) else {leaf: noise}
    return RowNoise(
        (str(name), host_tensor(f"noise of {name}", value)) for name, value in given.items()
    )


def sampling_of(
    request: Cosmos3Request, args: CheckpointArgs, scheduler: SchedulerFile
) -> Sampling:
    """Return number of steps, grid name and guided interval.  Raises: RequestError."""
    interval = _interval(request.guidance_interval)
    if request.sigmas is not None:
        levels = checked("sigmas", request.sigmas, (None,)).tolist()
        levels = [float(sigma) for sigma in request.sigmas]
        steps, grid = check_steps(len(levels), 1, MAX_STEPS), explicit_grid(levels)
    else:
        steps = check_steps(request.num_inference_steps, 1, MAX_STEPS)
        schedule = args.schedule if request.schedule is None else request.schedule
        if schedule is None:
            schedule = scheduler.schedule(args.use_karras_sigmas)
        shift = args.flow_shift if request.flow_shift is None else request.flow_shift
        grid = scheduler.grid(schedule, shift)
    try:
        sigmas_of(grid, steps)
    except ConfigError as error:  # of a configuration there, of a request here
        raise RequestError(str(error)) from error
    return Sampling(steps, grid, interval)


def _interval(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    # Floats and arrays too where they are whole numbers: JSON and msgpack may make them of these.
    found = value.tolist() if isinstance(value, (np.ndarray, Tensor)) else value
    good = isinstance(found, (tuple, list)) and len(found) == 2 and all(map(_is_whole, found))
    if not good or not -1 <= found[0] < found[1] <= 1001:
        raise RequestError(
            "guidance_interval must be two timesteps (low, high), whole numbers in [-1, 1001]; got "
            f"{value!r}. Send two of them, the lower one first."
        )
    return int(found[0]), int(found[1])


def _is_whole(value: Any) -> bool:
    return is_integer(value) or (isinstance(value, (float, np.floating)) and value == value // 1)
