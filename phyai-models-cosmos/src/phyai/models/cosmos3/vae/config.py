"""Sizes and statistics of a Wan2.2 VAE, from ``vae/config.json``, all checked.

Field names are those of the file, also ``temperal_downsample``. A key that is absent, or null, has
the released value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from phyai.errors import ConfigError
from phyai.json_files import read_json_object

FOLDER = "vae"
CONFIG_FILE = "config.json"
CLASS_NAME = "AutoencoderKLWan"
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
LIMITS = {
    "base_dim": 4096,
    "decoder_base_dim": 4096,
    "z_dim": 4096,
    "num_res_blocks": 64,
    "in_channels": 1024,
    "out_channels": 1024,
    "patch_size": 16,
    "scale_factor_spatial": 1024,
    "scale_factor_temporal": 1024,
}
MAX_LEVELS = 8
MAX_WIDTH = 65_536
_RGB = 3
_LATENTS_MEAN = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
    0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108,
    -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313,
    -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944,
    0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
_LATENTS_STD = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VAEConfig:
    """One autoencoder: pixels to latents, 1 + 4k frames to 1 + k, and back.

    dim_mult: width of each level, in ``base_dim`` (encoder) or ``decoder_base_dim``.
    temperal_downsample: whether the step to the next level also halves time.
    patch_size: side of the pixel squares that are folded into channels first.
    latents_mean, latents_std: of each latent channel; the transformer sees (z - mean) / std.

    >>> from phyai.models.cosmos3.vae import VAEConfig
    >>> config = VAEConfig()
    >>> config.latent_shape(frames=33, height=480, width=832)
    (48, 9, 30, 52)
    """

    base_dim: int = 160
    decoder_base_dim: int = 256
    z_dim: int = 48
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    in_channels: int = 12
    out_channels: int = 12
    patch_size: int = 2
    scale_factor_temporal: int = 4
    scale_factor_spatial: int = 16
    latents_mean: tuple[float, ...] = _LATENTS_MEAN
    latents_std: tuple[float, ...] = _LATENTS_STD

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise _wrong(name, f"an integer from 1 to {most}", value)
        self._check_levels()
        self._check_factors()
        self._check_statistics()

    def _check_levels(self) -> None:
        levels = self.dim_mult
        if not levels or len(levels) > MAX_LEVELS or any(type(m) is not int for m in levels):
            raise _wrong("dim_mult", f"1 to {MAX_LEVELS} integers", levels)
        widest = MAX_WIDTH // max(self.base_dim, self.decoder_base_dim)
        if not all(1 <= m <= widest for m in levels):
            raise _wrong("dim_mult", f"integers from 1 to {widest} at these widths", levels)
        halved = self.temperal_downsample
        if len(halved) != len(levels) - 1 or any(type(h) is not bool for h in halved):
            raise _wrong("temperal_downsample", f"{len(levels) - 1} booleans", halved)
        # Shortcuts fold pixels into channels, or spread channels over pixels, in whole groups.
        for index, (width, out) in enumerate(pairwise(self.encoder_widths)):
            _check_groups("base_dim", width * self._fold(index), out)
        halved_up = tuple(reversed(halved))
        for index, (width, out) in enumerate(pairwise(self.decoder_widths)):
            if index < len(halved_up):
                _check_groups("decoder_base_dim", out * (8 if halved_up[index] else 4), width)

    def _fold(self, level: int) -> int:
        if level == len(self.temperal_downsample):
            return 1
        return 8 if self.temperal_downsample[level] else 4

    def _check_factors(self) -> None:
        channels = _RGB * self.patch_size**2
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) != channels:
                raise _wrong(name, f"3 * patch_size^2 = {channels}", getattr(self, name))
        spatial = self.patch_size * 2 ** (len(self.dim_mult) - 1)
        if self.scale_factor_spatial != spatial:
            raise _wrong(
                "scale_factor_spatial", f"{spatial} at these levels", self.scale_factor_spatial
            )
        temporal = 2 ** sum(self.temperal_downsample)
        if self.scale_factor_temporal != temporal:
            raise _wrong(
                "scale_factor_temporal", f"{temporal} at these levels", self.scale_factor_temporal
            )

    def _check_statistics(self) -> None:
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            plain = all(type(v) in (int, float) and math.isfinite(v) for v in values)
            if len(values) != self.z_dim or not plain:
                raise _wrong(name, f"{self.z_dim} finite numbers", values)
        if min(self.latents_std) <= 0:
            raise _wrong("latents_std", "positive numbers", self.latents_std)

    @property
    def encoder_widths(self) -> tuple[int, ...]:
        """Width behind the first convolution, then behind each level."""
        return tuple(self.base_dim * m for m in (1, *self.dim_mult))

    @property
    def decoder_widths(self) -> tuple[int, ...]:
        """Width behind the first convolution, then behind each level, the coarsest first."""
        return tuple(self.decoder_base_dim * m for m in (self.dim_mult[-1], *self.dim_mult[::-1]))

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Return [z_dim, T, h, w] of a clip; pixels and frames that do not fill a latent are cut.

        Shapes: frames 1 + k * scale_factor_temporal, height and width multiples of
        scale_factor_spatial.
        """
        side = self.scale_factor_spatial
        return self.z_dim, self.latent_frames(frames), height // side, width // side

    def latent_frames(self, frames: int) -> int:
        """Return the latent frames of so many pixel frames."""
        return 1 + (frames - 1) // self.scale_factor_temporal

    def pixel_frames(self, latent_frames: int) -> int:
        """Return the pixel frames of so many latent frames."""
        return 1 + (latent_frames - 1) * self.scale_factor_temporal

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> VAEConfig:
        """Return the config of a ``vae/config.json``; keys it does not know are left alone.

        Raises: ConfigError for another architecture, and for values that are of another kind,
        beyond the limits, or do not fit together.
        """
        kind = data.get("_class_name", CLASS_NAME)
        if kind != CLASS_NAME:
            raise ConfigError(
                f"_class_name must be {CLASS_NAME!r}; got {kind!r}. Use a Wan2.2 autoencoder."
            )
        if data.get("is_residual", True) is not True:
            raise ConfigError(
                f"is_residual must be true; got {data['is_residual']!r}. The Wan2.1 autoencoder, "
                "without residual levels, is not supported."
            )
        if data.get("attn_scales"):
            raise ConfigError(
                f"attn_scales must be empty; got {data['attn_scales']!r}. Attention outside the "
                "middle block is not supported."
            )
        given = {f.name: data[f.name] for f in fields(cls) if data.get(f.name) is not None}
        for name, value in given.items():
            if isinstance(getattr(cls(), name), tuple):
                if not isinstance(value, (list, tuple)):
                    raise _wrong(name, "a list", value)
                given[name] = tuple(value)
        if "decoder_base_dim" not in given and "base_dim" in given:
            given["decoder_base_dim"] = given["base_dim"]
        return cls(**given)

    @classmethod
    def from_folder(cls, folder: str | Path) -> VAEConfig:
        """Return the config in an autoencoder's folder.

        Raises: CheckpointNotFound without a config.json; otherwise as ``from_json``.
        """
        return cls.from_json(read_json_object(Path(folder) / CONFIG_FILE))


def _check_groups(name: str, folded: int, groups: int) -> None:
    if folded % groups:
        raise ConfigError(
            f"{name} and dim_mult must let shortcuts fold {folded} values into {groups}; "
            "got a remainder. Correct the config."
        )


def _wrong(name: str, rule: str, value: object) -> ConfigError:
    text = repr(value)
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ConfigError(f"VAE {name} must be {rule}; got {shown}. Correct the config.")
