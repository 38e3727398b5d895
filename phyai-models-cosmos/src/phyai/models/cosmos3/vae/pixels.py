"""Clips as stacked frames with folded pixels, and where decoded frames are put together."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

RGB = 3


def stack_frames(clip: Tensor) -> Tensor:
    """Return [B, C, T, H, W] as [T * B, C, H, W], channels-last."""
    frames = clip.permute(2, 0, 1, 3, 4).flatten(0, 1)
    return frames.contiguous(memory_format=torch.channels_last)


def unstack_frames(frames: Tensor, rows: int) -> Tensor:
    """Return [T * B, C, H, W] as [B, C, T, H, W]."""
    by_time = frames.view(-1, rows, *frames.shape[1:])
    return by_time.permute(1, 2, 0, 3, 4)


def fold(pixels: Tensor, patch: int) -> Tensor:
    """Fold squares of pixels into channels, ordered (color, column, row).

    Shapes: [N, 3, H, W] -> [N, 3 * patch^2, H/patch, W/patch].
    """
    if patch == 1:
        return pixels
    number, colors, height, width = pixels.shape
    squares = pixels.view(number, colors, height // patch, patch, width // patch, patch)
    folded = squares.permute(0, 1, 5, 3, 2, 4).reshape(
        number, colors * patch * patch, height // patch, width // patch
    )
    return folded.contiguous(memory_format=torch.channels_last)


def unfold(folded: Tensor, patch: int) -> Tensor:
    """Undo ``fold``."""
    if patch == 1:
        return folded
    number, channels, height, width = folded.shape
    squares = folded.reshape(number, channels // patch**2, patch, patch, height, width)
    return squares.permute(0, 1, 4, 3, 5, 2).reshape(
        number, channels // patch**2, height * patch, width * patch
    )


class Canvas(Protocol):
    """Where pieces of decoded frames go."""

    def put(self, pixels: Tensor, frame: int, top: int = 0, left: int = 0) -> None:
        """Take pixels [T * B, 3, h, w] that begin at this frame, row and column."""
        ...


class FloatCanvas:
    """The clip [B, 3, T, H, W] float32; values are limited to [-1, 1] if asked to."""

    def __init__(
        self, rows: int, frames: int, size: tuple[int, int], device: torch.device, *, clamp: bool
    ) -> None:
        self.clip = torch.empty(rows, RGB, frames, *size, device=device)
        self._clamp = clamp

    def put(self, pixels: Tensor, frame: int, top: int = 0, left: int = 0) -> None:
        piece = unstack_frames(pixels, self.clip.shape[0])
        number, height, width = piece.shape[-3:]
        place = self.clip[:, :, frame : frame + number, top : top + height, left : left + width]
        place.copy_(piece)
        if self._clamp:
            place.clamp_(-1.0, 1.0)


class ByteCanvas:
    """The clip as pixels [B, T, H, W, 3] uint8 on the host: what a video file holds."""

    def __init__(self, rows: int, frames: int, size: tuple[int, int]) -> None:
        self.clip = torch.empty(rows, frames, *size, RGB, dtype=torch.uint8)

    def put(self, pixels: Tensor, frame: int, top: int = 0, left: int = 0) -> None:
        piece = as_bytes(unstack_frames(pixels, self.clip.shape[0])).permute(0, 2, 3, 4, 1)
        number, height, width = piece.shape[1:4]
        self.clip[:, frame : frame + number, top : top + height, left : left + width] = piece.cpu()


def as_bytes(pixels: Tensor) -> Tensor:
    """Return pixels in [-1, 1] as uint8, rounded; values outside are limited."""
    scaled = (pixels.float() / 2 + 0.5).clamp_(0.0, 1.0).mul_(255.0)
    return scaled.round_().to(torch.uint8)
