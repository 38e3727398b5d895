"""The Wan2.2 video autoencoder: clips to latents and back, streamed over time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from phyai.errors import ConfigError, RequestError
from phyai.layers import Placement
from phyai.models.cosmos3.exact_convolutions import exact_convolutions
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.cosmos3.vae.decoder import Decoder
from phyai.models.cosmos3.vae.encoder import Encoder
from phyai.models.cosmos3.vae.history import History
from phyai.models.cosmos3.vae.pixels import (
    RGB,
    ByteCanvas,
    Canvas,
    FloatCanvas,
    fold,
    stack_frames,
    unfold,
    unstack_frames,
)
from phyai.models.cosmos3.vae.rank_tiling import RankTiling
from phyai.models.cosmos3.vae.tiling import SpatialTiling
from phyai.timers import Profile
from phyai.weights import FiniteSource, LoadReport, Progress, load_pretrained, open_source

Tiling = SpatialTiling | RankTiling
# Encoder and decoder have one convolution each outside their own prefix.
_ENCODER_NAMES = (r"^encoder\.", r"^quant_conv\.")
_DECODER_NAMES = (r"^decoder\.", r"^post_quant_conv\.")


class WanVAE(nn.Module):
    """Clips of 1 + 4k frames <-> latents of 1 + k frames; other factors as the config says.

    encoder, decoder: leave out what is not needed; the policy only encodes.
    encode_dtype: of the encoder. None = float32, whatever the placement's dtype: rounding the
        condition shifts the whole trajectory, and one frame is cheap. The decoder has the
        placement's dtype.
    profile: counts ``vae_encoded_frames`` and ``vae_decoded_frames``, of pixels, on this rank.
    A clip is encoded frame 0 first, then 4 frames at a time, so memory does not grow with its
    length, and its first latent does not depend on later frames.

    >>> from phyai.kernels import KernelTable
    >>> config = VAEConfig(base_dim=4, decoder_base_dim=4, z_dim=2, num_res_blocks=1,
    ...                    latents_mean=(0.0, 0.5), latents_std=(1.0, 2.0))
    >>> vae = WanVAE(config, Placement(KernelTable(), torch.device("cpu"), torch.float32))
    >>> z = vae.encode_mean(torch.zeros(1, 3, 5, 32, 48))
    >>> z.shape, vae.decode(z).shape
    (torch.Size([1, 2, 2, 2, 3]), torch.Size([1, 3, 5, 32, 48]))
    """

    def __init__(
        self,
        config: VAEConfig,
        at: Placement,
        *,
        encoder: bool = True,
        decoder: bool = True,
        encode_dtype: torch.dtype | None = None,
        profile: Profile | None = None,
    ) -> None:
        super().__init__()
        self._profile = profile
        self.config, self.device = config, at.device
        self.encode_dtype, self.decode_dtype = encode_dtype or torch.float32, at.dtype
        self.encoder = Encoder(config, at.with_dtype(self.encode_dtype)) if encoder else None
        self.decoder = Decoder(config, at) if decoder else None
        for name in ("latents_mean", "latents_std"):
            values = torch.tensor(getattr(config, name), device=at.device)
            self.register_buffer(name, values.view(1, -1, 1, 1, 1), persistent=False)
        self.latents_mean: Tensor
        self.latents_std: Tensor

    def load(self, folder: str | Path, *, progress: Progress | None = None) -> LoadReport:
        """Fill the weights from an autoencoder's folder; parts left out are not read.

        Raises: as ``phyai.weights.load_pretrained``; CheckpointError for NaN or infinity.
        """
        ignore: tuple[str, ...] = () if self.encoder is not None else _ENCODER_NAMES
        ignore += () if self.decoder is not None else _DECODER_NAMES
        source = FiniteSource(open_source(folder))
        return load_pretrained(self, source, ignore=ignore, progress=progress)

    # ------------------------------------------------------------ pixels to latents

    def encode(self, pixels: Tensor) -> Tensor:
        """Return the moments of a clip: mean, then log-variance, float32.

        Shapes: pixels [B, 3, T, H, W] in [-1, 1] -> [B, 2 * z_dim, T', H/16, W/16].
        Raises: RequestError for sizes that latents cannot have; ConfigError without an encoder.
        """
        encoder = self._part(self.encoder, "encoder")
        self._check_pixels(pixels)
        history = History(rows=pixels.shape[0])
        step, frames = self.config.scale_factor_temporal, pixels.shape[2]
        bounds = [0, *range(1, frames + 1, step)]
        with exact_convolutions():
            parts = [
                encoder(self._folded(pixels[:, :, begin:end]), history)
                for begin, end in itertools.pairwise(bounds)
            ]
        self._count("vae_encoded_frames", pixels.shape[0] * frames)
        moments = torch.cat(parts).float()
        return unstack_frames(moments, pixels.shape[0]).contiguous()

    def encode_mean(self, pixels: Tensor) -> Tensor:
        """Return the raw latents of a clip, the means of ``encode``."""
        return self.encode(pixels)[:, : self.config.z_dim].contiguous()

    def encode_latents(self, pixels: Tensor) -> Tensor:
        """Return a clip as the transformer sees it: normalised means."""
        return self.normalise(self.encode_mean(pixels))

    def normalise(self, raw: Tensor) -> Tensor:
        """Return (raw - mean) / std per latent channel, float32. Shapes: [B, z_dim, T, h, w]."""
        return (raw.float() - self.latents_mean) / self.latents_std

    # ------------------------------------------------------------ latents to pixels

    def denormalise(self, latents: Tensor) -> Tensor:
        """Undo ``normalise``."""
        return latents.float() * self.latents_std + self.latents_mean

    def decode(self, raw: Tensor, *, tiling: Tiling | None = None, clamp: bool = True) -> Tensor:
        """Return the clip of raw latents, float32, limited to [-1, 1] unless told otherwise.

        Shapes: raw [B, z_dim, T, h, w] -> [B, 3, 1 + 4 * (T - 1), 16h, 16w].
        Raises: RequestError for another shape; ConfigError without a decoder.
        """
        rows, frames, size = self._clip_shape(raw)
        canvas = FloatCanvas(rows, frames, size, raw.device, clamp=clamp)
        self._draw(raw, tiling, canvas)
        return canvas.clip

    def decode_frames(self, latents: Tensor, *, tiling: Tiling | None = None) -> Tensor:
        """Return normalised latents as frames of a video file, on the host.

        Only one latent frame's pixels are held as floats at a time (a row of tiles with
        SpatialTiling).
        Shapes: [B, z_dim, T, h, w] -> uint8 [B, 1 + 4 * (T - 1), 16h, 16w, 3].
        Raises: as ``decode``.
        """
        rows, frames, size = self._clip_shape(latents)
        canvas = ByteCanvas(rows, frames, size)
        self._draw(self.denormalise(latents), tiling, canvas)
        return canvas.clip

    def decode_chunks(self, raw: Tensor) -> Iterator[Tensor]:
        """Yield the folded pixels of each latent frame: 1 frame, then 4 at a time.

        Shapes: raw [B, z_dim, T, h, w] -> [T' * B, out_channels, H, W] in the decoder's dtype.
        """
        decoder = self._part(self.decoder, "decoder")
        history = History(rows=raw.shape[0])
        for index in range(raw.shape[2]):
            latent = stack_frames(raw[:, :, index : index + 1].to(self.decode_dtype))
            with exact_convolutions():
                chunk = decoder(latent, history)
            self._count("vae_decoded_frames", chunk.shape[0])
            yield chunk

    def _count(self, name: str, number: int) -> None:
        if self._profile is not None:
            self._profile.count(name, number)

    def _draw(self, raw: Tensor, tiling: Tiling | None, canvas: Canvas) -> None:
        if tiling is not None:
            tiling.draw(self.decode_chunks, raw.to(self.decode_dtype), self.config, canvas)
            return
        at = 0
        for chunk in self.decode_chunks(raw):
            canvas.put(unfold(chunk, self.config.patch_size), at)
            at += chunk.shape[0] // raw.shape[0]

    def _folded(self, clip: Tensor) -> Tensor:
        return fold(stack_frames(clip.to(self.encode_dtype)), self.config.patch_size)

    def _clip_shape(self, latents: Tensor) -> tuple[int, int, tuple[int, int]]:
        good = latents.dim() == 5 and latents.shape[1] == self.config.z_dim
        if not good or 0 in latents.shape:
            raise RequestError(
                f"latents must have shape [rows, {self.config.z_dim}, frames, height, width]; got "
                f"{list(latents.shape)}. Use the latents of this autoencoder."
            )
        rows, _, frames, height, width = latents.shape
        side = self.config.scale_factor_spatial
        return rows, self.config.pixel_frames(frames), (height * side, width * side)

    def _check_pixels(self, pixels: Tensor) -> None:
        side, step = self.config.scale_factor_spatial, self.config.scale_factor_temporal
        shape = list(pixels.shape)
        good = len(shape) == 5 and shape[1] == RGB and 0 not in shape
        if not good or (shape[2] - 1) % step or shape[3] % side or shape[4] % side:
            raise RequestError(
                f"pixels must have shape [rows, 3, 1 + {step}k frames, height, width] with height "
                f"and width multiples of {side}; got {shape}. Resize or cut the clip."
            )

    @staticmethod
    def _part(part: nn.Module | None, name: str) -> nn.Module:
        if part is None:
            raise ConfigError(
                f"the VAE must have its {name} for this; got one built without. Build it with "
                f"{name}=True."
            )
        return part
