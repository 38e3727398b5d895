"""Sizes and settings of a Cosmos3 transformer, from ``transformer/config.json``, all checked.

Field names are those of the file. A key that is absent, or null, has the released Nano's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phyai.errors import ConfigError
from phyai.json_files import read_json_object

MROPE_SECTION = (24, 20, 20)
FOLDER = "transformer"
CONFIG_FILE = "config.json"
CLASS_NAME = "Cosmos3OmniTransformer"
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
LIMITS = {
    "hidden_size": 65_536,
    "intermediate_size": 524_288,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "vocab_size": 4_194_304,
    "latent_channel": 4096,
    "latent_patch_size": 16,
    "action_dim": 4096,
    "num_embodiment_domains": 4096,
    "sound_dim": 4096,
    "unified_3d_mrope_temporal_modality_margin": 1_000_000,
}
_FLAGS = ("enable_fps_modulation", "action_gen", "sound_gen")
_NUMBERS = ("rms_norm_eps", "rope_theta", "timestep_scale", "base_fps", "sound_latent_fps")
# Key -> the only value this runtime computes with, and what another one means.
_SETTLED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("silu", "the Edge models with another activation are"),
    "attention_bias": (False, "biased attention is"),
    "qk_norm_for_text": (True, "the Edge models, without norms of text queries and keys, are"),
    "use_und_k_norm_for_gen": (False, "the Edge models, with another norm of keys, are"),
    "unified_3d_mrope_reset_spatial_ids": (True, "running spatial positions are"),
}


@dataclass(frozen=True, slots=True)
class Cosmos3Config:
    """One transformer: two experts per layer (UND for text, GEN for media) and the media's heads.

    mrope_section: rotary frequencies that turn with time, row and column.
    unified_3d_mrope_temporal_modality_margin: positions between the text and the media.
    base_fps: frames per second at which one second is ``base_fps / 4`` positions of time.
    action_gen, sound_gen: whether the checkpoint has these heads.

    >>> from phyai.models.cosmos3.config import Cosmos3Config
    >>> config = Cosmos3Config.from_json({"num_hidden_layers": 64, "hidden_size": 5120})
    >>> config.num_hidden_layers, config.head_dim, config.patch_values
    (64, 128, 192)
    """

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    mrope_section: tuple[int, int, int] = MROPE_SECTION
    latent_channel: int = 48
    latent_patch_size: int = 2
    timestep_scale: float = 0.001
    base_fps: float = 24.0
    enable_fps_modulation: bool = True
    unified_3d_mrope_temporal_modality_margin: int = 15_000
    action_gen: bool = True
    action_dim: int = 64
    num_embodiment_domains: int = 32
    sound_gen: bool = True
    sound_dim: int = 64
    sound_latent_fps: float = 25.0

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise _wrong(name, f"an integer from 1 to {most}", value)
        for name in _FLAGS:
            if type(getattr(self, name)) is not bool:
                raise _wrong(name, "true or false", getattr(self, name))
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < 1e12:
                raise _wrong(name, "a positive number", value)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "num_attention_heads must be a multiple of num_key_value_heads; got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}. Correct the config."
            )
        self._check_section()

    def _check_section(self) -> None:
        section, half = self.mrope_section, self.head_dim // 2
        good = type(section) is tuple and len(section) == 3
        if not good or any(type(part) is not int or part < 1 for part in section):
            raise _wrong("mrope_section", "three positive integers", section)
        if self.head_dim % 2 or sum(section) != half:
            raise ConfigError(
                "mrope_section must add up to half of an even head_dim; got "
                f"{list(section)} for head_dim {self.head_dim}. Correct the config."
            )
        # Row and column frequencies alternate from the front, with a step of three.
        if 3 * section[1] - 2 >= half or 3 * section[2] - 1 >= half:
            raise ConfigError(
                "mrope_section must leave room to alternate the axes; got "
                f"{list(section)} for head_dim {self.head_dim}. Correct the config."
            )

    @property
    def patch_values(self) -> int:
        """Numbers of one patch of the video latent."""
        return self.latent_patch_size**2 * self.latent_channel

    @property
    def margin(self) -> int:
        return self.unified_3d_mrope_temporal_modality_margin

    @property
    def q_size(self) -> int:
        """Width of all query heads; need not be ``hidden_size``."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cosmos3Config:
        """Return the config of a ``transformer/config.json``; keys it does not know are left alone.

        Raises: ConfigError for another architecture, the Edge models' options, and for values that
        are of another kind, beyond the limits, or do not fit together.
        """
        kind = data.get("_class_name", CLASS_NAME)
        if kind != CLASS_NAME:
            raise ConfigError(
                f"_class_name must be {CLASS_NAME!r}; got {kind!r}. Use a Cosmos3 checkpoint in "
                "the released layout."
            )
        for name, (wanted, meaning) in _SETTLED.items():
            value = data.get(name)
            if value is not None and (type(value) is not type(wanted) or value != wanted):
                raise ConfigError(
                    f"{name} must be {wanted!r}: {meaning} not supported; got {value!r}. "
                    "Use a Cosmos3 Nano or Super checkpoint."
                )
        values = {f.name: data[f.name] for f in fields(cls) if data.get(f.name) is not None}
        values["mrope_section"] = _section(data)
        if (theta := _theta(data)) is not None:
            values["rope_theta"] = theta
        for name in _NUMBERS:
            if type(values.get(name)) is int:
                values[name] = _float(name, values[name])
        config = cls(**values)
        stated = data.get("patch_latent_dim")
        if stated is not None and stated != config.patch_values:
            raise ConfigError(
                f"patch_latent_dim must be latent_channel * latent_patch_size^2 = "
                f"{config.patch_values}; got {stated!r}. Correct the config."
            )
        return config

    @classmethod
    def from_folder(cls, folder: str | Path) -> Cosmos3Config:
        """Return the config of a checkpoint folder, or of its transformer folder.

        Raises: CheckpointNotFound, CheckpointError for a file that is no JSON object, ConfigError.
        """
        return cls.from_json(read_json_object(transformer_folder(Path(folder)) / CONFIG_FILE))


def transformer_folder(folder: Path) -> Path:
    """Return the folder with the transformer's config and weights."""
    inner = folder / FOLDER
    return inner if inner.is_dir() else folder


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary settings, under their older or newer name; empty without any."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _wrong("rope_scaling", "an object", rope)
    if rope.get("mrope_interleaved", True) is not True or rope.get("rope_type", "default") not in (
        "default",
        "mrope",
    ):
        raise ConfigError(
            "rope_scaling must be interleaved, of type default; got "
            f"{dict(rope)!r}. Other rotary positions are not supported."
        )
    return rope


def _theta(data: Mapping[str, Any]) -> Any:
    """Return rope_theta; newer files hold it among the rotary settings, some in both places."""
    outer, inner = data.get("rope_theta"), _rope(data).get("rope_theta")
    if outer is not None and inner is not None and outer != inner:
        raise _wrong("rope_theta", f"{inner!r}, as in the rotary settings", outer)
    return inner if outer is None else outer


def _section(data: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return mrope_section; rope_axes_dim, which repeats it, must say the same."""
    axes = data.get("rope_axes_dim")
    section = _rope(data).get("mrope_section")
    if section is None:
        section = axes
    if section is None:
        return MROPE_SECTION
    if not isinstance(section, list | tuple):
        raise _wrong("mrope_section", "three positive integers", section)
    if axes is not None and list(axes if isinstance(axes, list | tuple) else ()) != list(section):
        raise _wrong("rope_axes_dim", f"mrope_section {list(section)}", axes)
    return tuple(section)


def _float(name: str, value: int) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise _wrong(name, "a positive number", value) from error


def _wrong(name: str, rule: str, value: Any) -> ConfigError:
    if type(value) is int and value.bit_length() > 256:  # Python refuses to write some of these
        text = f"an integer of {value.bit_length()} bits"
    else:
        text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return ConfigError(f"{name} must be {rule}; got {shown}. Correct {name} in the config.")
