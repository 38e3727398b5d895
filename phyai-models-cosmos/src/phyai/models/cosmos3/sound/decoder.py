"""The sound decoder: latents to a stereo waveform."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from phyai.errors import RequestError
from phyai.layers import Placement
from phyai.models.cosmos3.exact_convolutions import exact_convolutions
from phyai.models.cosmos3.sound.config import SoundConfig
from phyai.models.cosmos3.sound.layers import SnakeBeta, SoundConv, StretchConv
from phyai.weights import FiniteSource, LoadReport, Progress, load_pretrained, open_source

_TAPS = 7
_DILATIONS = (1, 3, 9)
# The file may also hold the encoder, which generation does not need.
_UNUSED = (r"^encoder\.", r"^bottleneck\.")


class ResidualUnit(nn.Module):
    """x + conv1(snake(conv7(snake(x)))). Shapes: [B, C, T] -> the same."""

    def __init__(self, name: str, width: int, dilation: int, at: Placement) -> None:
        super().__init__()
        self.snake1 = SnakeBeta(f"{name}.snake1", width, at)
        self.conv1 = SoundConv(f"{name}.conv1", width, width, at, taps=_TAPS, dilation=dilation)
        self.snake2 = SnakeBeta(f"{name}.snake2", width, at)
        self.conv2 = SoundConv(f"{name}.conv2", width, width, at, taps=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.snake2(self.conv1(self.snake1(x))))
        out: Tensor = y.add_(x)
        return out


class StretchBlock(nn.Module):
    """Stretches time, then three residual units. Shapes: [B, in, T] -> [B, out, stride * T]."""

    def __init__(self, name: str, into: int, out: int, stride: int, at: Placement) -> None:
        super().__init__()
        self.snake = SnakeBeta(f"{name}.snake1", into, at)
        self.stretch = StretchConv(f"{name}.conv_t1", into, out, stride, at)
        self.units = nn.Sequential(
            *(
                ResidualUnit(f"{name}.res_unit{i}", out, dilation, at)
                for i, dilation in enumerate(_DILATIONS, 1)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.units(self.stretch(self.snake(x)))
        return out


class SoundDecoder(nn.Module):
    """Sound latents -> waveform in [-1, 1].

    Everything is float32, whatever the placement's dtype: sines of large activations leave nothing
    of a bfloat16 one's phase.
    Source: Oobleck decoder of Stable Audio (arXiv 2407.14358), with SnakeBeta and no final tanh.

    >>> from phyai.kernels import KernelTable
    >>> config = SoundConfig(6, 4, (1, 2), (2, 4), hop_size=8, sampling_rate=1000)
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> SoundDecoder(config, at).decode(torch.zeros(1, 6, 5)).shape
    torch.Size([1, 2, 40])
    """

    def __init__(self, config: SoundConfig, at: Placement) -> None:
        super().__init__()
        self.config = config
        at = at.with_dtype(torch.float32)
        widths, strides = config.widths, tuple(reversed(config.dec_strides))
        self.conv_in = SoundConv(
            "decoder.conv1", config.vocoder_input_dim, widths[0], at, taps=_TAPS
        )
        self.blocks = nn.Sequential(
            *(
                StretchBlock(f"decoder.block.{i}", into, out, strides[i], at)
                for i, (into, out) in enumerate(pairwise(widths))
            )
        )
        self.snake = SnakeBeta("decoder.snake1", widths[-1], at)
        self.conv_out = SoundConv(
            "decoder.conv2", widths[-1], config.dec_out_channels, at, taps=_TAPS, bias=False
        )

    def load(self, folder: str | Path, *, progress: Progress | None = None) -> LoadReport:
        """Fill the weights from a sound tokenizer's folder; its encoder is not read.

        Raises: as ``phyai.weights.load_pretrained``; CheckpointError for NaN or infinity.
        """
        source = FiniteSource(open_source(folder))
        return load_pretrained(self, source, ignore=_UNUSED, progress=progress)

    def decode(self, latents: Tensor, *, clamp: bool = True) -> Tensor:
        """Return the waveform, float32, limited to [-1, 1] unless told otherwise.

        Shapes: latents [B, vocoder_input_dim, T] -> [B, dec_out_channels, T * hop_size].
        Raises: RequestError for another shape.
        """
        if latents.dim() != 3 or latents.shape[1] != self.config.vocoder_input_dim:
            raise RequestError(
                f"sound latents must have shape [rows, {self.config.vocoder_input_dim}, frames]; "
                f"got {list(latents.shape)}. Use the latents of this checkpoint."
            )
        with exact_convolutions():
            x = self.blocks(self.conv_in(latents.float()))
            wave: Tensor = self.conv_out(self.snake(x))
        return wave.clamp_(-1.0, 1.0) if clamp else wave
