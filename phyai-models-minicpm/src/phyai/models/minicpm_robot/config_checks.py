"""What the sizes of a MiniCPM-RobotManip config must satisfy to be run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.models.minicpm_robot.config import HeadSizes, MiniCPMRobotConfig, TextSizes

MAX_SIZE = 1 << 24
"""Far above any size of a model: more is a broken file."""
MAX_LAYERS = 1024
# What may be 0: no token of the vocabulary is excluded, and a head may have no future tokens.
_FROM_ZERO = {"image_token_id", "num_target_vision_tokens", "insert_layer_id"}


def check_config(config: MiniCPMRobotConfig) -> None:
    """Raise ConfigError, naming the field, unless the sizes work together."""
    for part in (config.vision, config.text, config.head, config):
        _check_integers(part)
        _check_others(part)
    _check_layers(config)
    for problem in (*_text(config.text), *_head(config.head), *_whole(config)):
        if problem:
            raise ConfigError(f"{problem}. Correct config.json.")


def _check_integers(part: object) -> None:
    from phyai.models.minicpm_robot.config import LIMITS

    for field in fields(part):  # type: ignore[arg-type]
        if field.type != "int":
            continue
        value = getattr(part, field.name)
        least = 0 if field.name in _FROM_ZERO else 1
        most = LIMITS.get(field.name, MAX_LAYERS if "num_" in field.name else MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"{field.name} must be an integer in [{least}, {most}]; got {value!r}. "
                "Correct config.json."
            )


def _check_others(part: object) -> None:
    """Check fields that hold one number with a point, or a switch."""
    for field in fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if field.type == "float" and not (number and 0 < value < math.inf):
            raise ConfigError(
                f"{field.name} must be a finite number above 0; got {value!r}. Correct config.json."
            )
        if field.type == "bool" and not isinstance(value, bool):
            raise ConfigError(
                f"{field.name} must be true or false; got {value!r}. Correct config.json."
            )


def _check_layers(config: MiniCPMRobotConfig) -> None:
    from phyai.models.minicpm_robot.config import FULL, LINEAR

    text = config.text
    section: object = text.mrope_section
    if not isinstance(section, tuple) or len(section) != 3 or not all(map(_is_count, section)):
        raise ConfigError(
            f"mrope_section must be three integers of at least 0; got {section!r}. "
            "Correct config.json."
        )
    types: object = text.layer_types
    if not isinstance(types, tuple) or not all(isinstance(kind, str) for kind in types):
        raise ConfigError(
            f"layer_types must be a list of names; got {types!r}. Correct config.json."
        )
    if len(text.layer_types) != text.num_hidden_layers or set(text.layer_types) - {LINEAR, FULL}:
        raise ConfigError(
            f"layer_types must name {LINEAR} or {FULL} for each of the {text.num_hidden_layers} "
            f"layers; got {list(text.layer_types)!r}. Correct config.json."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE


def _text(text: TextSizes) -> Iterator[str]:
    yield _multiple("num_attention_heads", text.num_attention_heads,
                    "num_key_value_heads", text.num_key_value_heads)  # fmt: skip
    yield _multiple("linear_num_value_heads", text.linear_num_value_heads,
                    "linear_num_key_heads", text.linear_num_key_heads)  # fmt: skip
    if not text.partial_rotary_factor <= 1:
        yield f"partial_rotary_factor must be at most 1; got {text.partial_rotary_factor}"
        return
    if not 2 <= text.rotary_dim <= text.head_dim or text.rotary_dim % 2:
        yield (
            f"partial_rotary_factor must leave an even number of rotating dims of {text.head_dim}; "
            f"got {text.partial_rotary_factor}"
        )
    if text.linear_conv_kernel_dim < 2:
        yield f"linear_conv_kernel_dim must be at least 2; got {text.linear_conv_kernel_dim}"


def _head(head: HeadSizes) -> Iterator[str]:
    inner = head.num_attention_heads * head.attention_head_dim
    if head.width != inner:
        yield (
            "width of the action head must be its heads times their dim; got "
            f"{head.width} and {head.num_attention_heads} x {head.attention_head_dim}"
        )
    if head.width % 2:
        yield f"width of the action head must be even for its time code; got {head.width}"
    if head.add_pos_embed and head.max_seq_len < head.action_horizon:
        yield (
            f"max_seq_len must be at least action_horizon = {head.action_horizon}; got "
            f"{head.max_seq_len}"
        )


def _whole(config: MiniCPMRobotConfig) -> Iterable[str]:
    vision, text, head = config.vision, config.text, config.head
    yield _multiple("vision hidden_size", vision.hidden_size,
                    "num_attention_heads", vision.num_attention_heads)  # fmt: skip
    yield _multiple("vision image_size", vision.image_size, "patch_size", vision.patch_size)
    yield _multiple("image_size", config.image_size, "patch_size x merge",
                    vision.patch_size * config.merge)  # fmt: skip
    if vision.insert_layer_id >= vision.num_hidden_layers:
        yield (
            f"insert_layer_id must be below num_hidden_layers = {vision.num_hidden_layers}; got "
            f"{vision.insert_layer_id}"
        )
    if config.image_token_id >= text.vocab_size:
        yield (
            f"image_token_id must be below vocab_size = {text.vocab_size}; got "
            f"{config.image_token_id}"
        )
    if head.cross_attention_dim != text.hidden_size:
        yield (
            "cross_attention_dim must equal the text hidden_size; got "
            f"{head.cross_attention_dim} and {text.hidden_size}"
        )


def _multiple(name: str, value: int, other: str, unit: int) -> str:
    return "" if value % unit == 0 else f"{name} must be a multiple of {other}; got {value}, {unit}"
