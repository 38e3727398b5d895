"""Sizes of a Qwen3-VL backbone, read from the two halves of its ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from phyai.errors import ConfigError

_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True)
class Qwen3VLVisionConfig:
    """Sizes of a ``VisionTower``; names as in the ``vision_config`` of Qwen3-VL.

    deepstack_visual_indexes: blocks whose output is also handed to the language model.
    num_position_embeddings: entries of the square table of learned positions.

    >>> from phyai.backbones.qwen3_vl import Qwen3VLVisionConfig
    >>> config = Qwen3VLVisionConfig(24, 1024, 16, 4096, 2048, 2304, (5, 11, 17))
    >>> config.head_dim, config.table_side, config.patch_values
    (64, 48, 1536)
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3

    def __post_init__(self) -> None:
        _check_sizes("vision_config", self, ("deepstack_visual_indexes",))
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ConfigError(
                "vision hidden_size must be num_heads times a head dim that is a multiple of 4; "
                f"got {self.hidden_size} and {self.num_heads} heads. Correct the config."
            )
        if self.table_side**2 != self.num_position_embeddings:
            raise ConfigError(
                "vision num_position_embeddings must be a square number; got "
                f"{self.num_position_embeddings}. Correct the config."
            )
        taps = self.deepstack_visual_indexes
        if list(taps) != sorted(set(taps)) or any(not 0 <= tap < self.depth for tap in taps):
            raise ConfigError(
                f"vision deepstack_visual_indexes must be rising numbers below depth {self.depth}; "
                f"got {list(taps)}. Correct the config."
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Rows, and columns, of the table of learned positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_values(self) -> int:
        """Numbers of one patch row: channels, frames and pixels."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge(self) -> int:
        """Patches that become one image token."""
        return self.spatial_merge_size**2

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Qwen3VLVisionConfig:
        """Return the config of a ``vision_config`` object; keys it does not know are left alone.

        Raises: ConfigError for a missing size, another activation or sizes that do not fit.
        """
        _check_word("vision_config", data, "hidden_act", "gelu_pytorch_tanh")
        return _from_json("vision_config", cls, data)


@dataclass(frozen=True, slots=True)
class Qwen3VLTextConfig:
    """Sizes of a ``TextStack``; names as in the ``text_config`` of Qwen3-VL.

    mrope_section: how many rotary frequencies turn with the time, row and column position.

    >>> from phyai.backbones.qwen3_vl import Qwen3VLTextConfig
    >>> config = Qwen3VLTextConfig(151936, 2048, 28, 16, 8, 128, 6144, (24, 20, 20))
    >>> config.rope_theta, config.rms_norm_eps
    (5000000.0, 1e-06)
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    mrope_section: tuple[int, ...]
    rope_theta: float = 5e6
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_sizes("text_config", self, ("mrope_section", "rope_theta", "rms_norm_eps"))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "text num_attention_heads must be a multiple of num_key_value_heads; got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}. Correct the config."
            )
        section = self.mrope_section
        good = len(section) == 3 and all(part > 0 for part in section)
        if self.head_dim % 2 or not good or sum(section) != self.head_dim // 2:
            raise ConfigError(
                "text mrope_section must be three positive numbers that add up to half of an even "
                f"head_dim; got {list(section)} for head_dim {self.head_dim}. Correct the config."
            )
        # Row and column frequencies alternate from the front, with a step of three.
        if 3 * section[1] - 2 >= sum(section) or 3 * section[2] - 1 >= sum(section):
            raise ConfigError(
                "text mrope_section must leave room to alternate the axes; got "
                f"{list(section)} for head_dim {self.head_dim}. Correct the config."
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"text {name} must be positive; got {value!r}. Correct {name}.")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Qwen3VLTextConfig:
        """Return the config of a ``text_config`` object; keys it does not know are left alone.

        Raises: ConfigError for a missing size, biased attention, another activation or another
            kind of rotary positions, and for sizes that do not fit.
        """
        _check_word("text_config", data, "hidden_act", "silu")
        if data.get("attention_bias"):
            raise ConfigError(
                "text_config attention_bias must be false; got true. This checkpoint is of "
                "another architecture."
            )
        # rope_parameters: the name, and the place of theta, since transformers 5.
        rope = data.get("rope_scaling") or data.get("rope_parameters")
        if not isinstance(rope, Mapping) or "mrope_section" not in rope:
            raise ConfigError(
                "text_config must have rope_scaling with mrope_section; got "
                f"{rope!r}. Pass the config of a Qwen3-VL model."
            )
        if rope.get("mrope_interleaved") is not True or rope.get("rope_type", "default") not in (
            "default",
            "mrope",
        ):
            raise ConfigError(
                "text_config rope_scaling must be interleaved, of type default; got "
                f"{dict(rope)!r}. Other rotary positions are not supported."
            )
        known = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        merged = {**data, **known, "mrope_section": rope["mrope_section"]}
        return _from_json("text_config", cls, merged)


def _from_json(section: str, kind: type[_Config], data: Mapping[str, Any]) -> _Config:
    names = [entry.name for entry in fields(kind)]  # type: ignore[arg-type]
    known = {name: data[name] for name in names if data.get(name) is not None}
    for name, value in known.items():
        if isinstance(value, Sequence) and not isinstance(value, str):
            known[name] = tuple(value)
        elif name in ("rope_theta", "rms_norm_eps") and isinstance(value, int):
            known[name] = float(value)
    try:
        return kind(**known)
    except TypeError as error:  # a field without default
        missing = [name for name in names if name not in known]
        raise ConfigError(
            f"{section} must have all sizes; got none for {', '.join(missing)}. Pass the config "
            "of a Qwen3-VL model."
        ) from error


def _check_word(section: str, data: Mapping[str, Any], name: str, wanted: str) -> None:
    if data.get(name, wanted) != wanted:
        raise ConfigError(
            f"{section} {name} must be {wanted!r}; got {data[name]!r}. This checkpoint is of "
            "another architecture."
        )


def _check_sizes(section: str, config: Any, others: Sequence[str]) -> None:
    """Raise ConfigError unless every field but ``others`` is a positive integer."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if entry.name in others:
            values = value if isinstance(value, tuple) else (value,)
            number = (int, float) if entry.name.startswith(("rope", "rms")) else int
            good = all(isinstance(v, number) and not isinstance(v, bool) for v in values)
        else:
            good = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not good:
            raise ConfigError(
                f"{section} {entry.name} must be a positive number of its kind; got {value!r}. "
                "Correct the config."
            )
