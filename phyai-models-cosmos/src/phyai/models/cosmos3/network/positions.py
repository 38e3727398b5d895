"""Positions of tokens on three axes: time, row, column. Host only, float32.

Text token j has (j, j, j). Media begin ``margin`` behind the text, share one clock, six positions
a second at 24 frames per second, and count rows and columns from 0. Here their time is relative:
text length and margin are added once the text is known.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.cosmos3.config import Cosmos3Config

TEMPORAL = 4
"""Frames of a video in one frame of its latent, of the released autoencoder."""


def text_positions(tokens: int) -> Tensor:
    """Return [3, tokens]."""
    return torch.arange(tokens, dtype=torch.float32).expand(3, tokens)


def media_positions(
    config: Cosmos3Config,
    *,
    frames: int,
    rows: int,
    columns: int,
    fps: float | None = None,
    actions: int = 0,
    action_start: int = 0,
    sound: int = 0,
    temporal: int = TEMPORAL,
) -> Tensor:
    """Return [3, N] of one request's video, action and sound tokens, in this order.

    frames, rows, columns: patches of the video latent.  fps: None for images.  action_start: 0
    when the first action row is the state at frame 0, 1 when it leads to frame 1, below 0 with rows
    from before.  sound: frames of the sound latent.  temporal: frames of a video in one frame of
    its latent.
    Raises: RequestError for an fps that is no positive number.
    """
    parts = [video_positions(config, (frames, rows, columns), fps, temporal)]
    if actions:
        parts.append(action_positions(config, actions, fps, action_start, temporal))
    if sound:
        parts.append(sound_positions(config, sound))
    return torch.cat(parts, dim=1)


def video_positions(
    config: Cosmos3Config,
    grid: tuple[int, int, int],
    fps: float | None,
    temporal: int = TEMPORAL,
) -> Tensor:
    """Return [3, T * H * W]; one frame, or no fps: whole numbers.

    >>> video_positions(Cosmos3Config(), (2, 1, 2), 12.0)[0].tolist()
    [0.0, 0.0, 2.0, 2.0]
    """
    frames, rows, columns = grid
    time = torch.arange(frames, dtype=torch.float32)
    if frames > 1:
        time = _clock(config, time, fps, temporal, temporal)
    axes = (time, torch.arange(rows).float(), torch.arange(columns).float())
    return torch.stack([axis.reshape(-1) for axis in torch.meshgrid(*axes, indexing="ij")])


def action_positions(
    config: Cosmos3Config,
    actions: int,
    fps: float | None,
    start: int = 0,
    temporal: int = TEMPORAL,
) -> Tensor:
    """Return [3, actions]; a single row: a whole number."""
    time = torch.arange(actions, dtype=torch.float32) + start
    return _on_time(_clock(config, time, fps, 1, temporal) if actions > 1 else time)


def sound_positions(config: Cosmos3Config, frames: int) -> Tensor:
    """Return [3, frames]; the sound's rate is the checkpoint's."""
    time = torch.arange(frames, dtype=torch.float32)
    if config.enable_fps_modulation:
        time = time / config.sound_latent_fps * config.base_fps
    return _on_time(time)


def _clock(
    config: Cosmos3Config, time: Tensor, fps: float | None, compression: int, temporal: int
) -> Tensor:
    """Return time in positions of tokens that each stand for ``compression`` frames."""
    if fps is None:
        return time
    if type(fps) not in (int, float) or not (math.isfinite(fps) and fps > 0):
        raise RequestError(f"fps must be a positive number; got {fps!r}. Correct fps.")
    if not config.enable_fps_modulation:
        return time
    return time / (fps / compression) * (config.base_fps / temporal)


def _on_time(time: Tensor) -> Tensor:
    return torch.stack([time, torch.zeros_like(time), torch.zeros_like(time)])
