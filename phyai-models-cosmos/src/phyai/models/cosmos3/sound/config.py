"""Sizes of a sound decoder, from ``sound_tokenizer/config.json``, all checked.

Field names are those of the file. A key that is absent, or null, has the released value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from phyai.errors import ConfigError
from phyai.json_files import read_json_object

FOLDER = "sound_tokenizer"
CONFIG_FILE = "config.json"
CLASS_NAME = "Cosmos3AVAEAudioTokenizer"
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
LIMITS = {
    "dec_dim": 4096,
    "dec_out_channels": 8,
    "vocoder_input_dim": 4096,
    "sampling_rate": 768_000,
    "hop_size": 1_000_000,
}
MAX_BLOCKS = 12
MAX_STRIDE = 64
MAX_WIDTH = 65_536
# Key -> the only value this runtime computes with.
_SETTLED: dict[str, Any] = {
    "dec_type": "oobleck",
    "activation": "snakebeta",
    "dec_use_snake": True,
    "snake_logscale": True,
    "causal": False,
    "dec_anti_aliasing": False,
    "dec_use_nearest_upsample": False,
    "dec_final_tanh": False,
    "dec_use_tanh_at_final": False,
    "padding_mode": "zeros",
}


@dataclass(frozen=True, slots=True)
class SoundConfig:
    """One decoder: latents at ``sampling_rate / hop_size`` per second to a waveform.

    dec_strides: samples per step of each block, the last block first.  dec_c_mults: width of each
    block, in ``dec_dim``, in the same order.  vocoder_input_dim: channels of a latent.

    >>> from phyai.models.cosmos3.sound import SoundConfig
    >>> SoundConfig().latent_rate
    25.0
    """

    vocoder_input_dim: int = 64
    dec_dim: int = 320
    dec_c_mults: tuple[int, ...] = (1, 2, 4, 8, 16)
    dec_strides: tuple[int, ...] = (2, 4, 5, 6, 8)
    dec_out_channels: int = 2
    sampling_rate: int = 48_000
    hop_size: int = 1920

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise _wrong(name, f"an integer from 1 to {most}", value)
        for name, most in (("dec_c_mults", MAX_WIDTH // self.dec_dim), ("dec_strides", MAX_STRIDE)):
            values = getattr(self, name)
            if not 1 <= len(values) <= MAX_BLOCKS or any(type(v) is not int for v in values):
                raise _wrong(name, f"1 to {MAX_BLOCKS} integers", values)
            if not all(1 <= v <= most for v in values):
                raise _wrong(name, f"integers from 1 to {most}", values)
        if len(self.dec_c_mults) != len(self.dec_strides):
            raise _wrong("dec_c_mults", f"{len(self.dec_strides)} integers", self.dec_c_mults)
        if self.hop_size != prod(self.dec_strides):
            raise _wrong(
                "hop_size", f"the product of dec_strides, {prod(self.dec_strides)}", self.hop_size
            )

    @property
    def widths(self) -> tuple[int, ...]:
        """Width in front of the first block, then behind each."""
        return tuple(self.dec_dim * m for m in (*reversed(self.dec_c_mults), 1))

    @property
    def latent_rate(self) -> float:
        """Latent frames per second."""
        return self.sampling_rate / self.hop_size

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SoundConfig:
        """Return the config of a ``sound_tokenizer/config.json``; other keys are left alone.

        Raises: ConfigError for another architecture, and for values that are of another kind,
        beyond the limits, or do not fit together.
        """
        for name, only in {"_class_name": CLASS_NAME, **_SETTLED}.items():
            value = data.get(name)
            if value is not None and value != only:
                raise ConfigError(
                    f"sound {name} must be {only!r}; got {value!r}. Other decoders are not "
                    "supported."
                )
        for name in ("latent_mean", "latent_std"):
            if data.get(name) is not None:
                raise ConfigError(
                    f"sound {name} must be null; got {data[name]!r}. Normalised latents are not "
                    "supported."
                )
        given = {f.name: data[f.name] for f in fields(cls) if data.get(f.name) is not None}
        for name in ("dec_c_mults", "dec_strides"):
            if name in given:
                if not isinstance(given[name], (list, tuple)):
                    raise _wrong(name, "a list", given[name])
                given[name] = tuple(given[name])
        strides = given.get("dec_strides", ())
        if "hop_size" not in given and strides and all(type(v) is int for v in strides):
            given["hop_size"] = prod(strides)
        return cls(**given)

    @classmethod
    def from_folder(cls, folder: str | Path) -> SoundConfig:
        """Return the config in a sound tokenizer's folder.

        Raises: CheckpointNotFound without a config.json; otherwise as ``from_json``.
        """
        return cls.from_json(read_json_object(Path(folder) / CONFIG_FILE))


def _wrong(name: str, rule: str, value: object) -> ConfigError:
    text = repr(value)
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return ConfigError(f"sound {name} must be {rule}; got {shown}. Correct the config.")
