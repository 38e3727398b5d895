"""Reads ``config.json`` and ``arch.json`` of a checkpoint folder into a PiConfig.

LeRobot files carry ``type`` and feature tables; the openpi converter writes five fields only.
``arch.json`` holds sizes the official config cannot express and wins over it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from phyai.errors import CheckpointError, did_you_mean
from phyai.json_files import read_json_object
from phyai.models.pi.config import (
    BASE_CAMERAS,
    GEMMA_VARIANTS,
    IMAGE_PREFIX,
    MAX_CAMERAS,
    MODELS,
    GemmaConfig,
    Model,
    PiConfig,
    RTCConfig,
    SiglipConfig,
)

_LEGACY_FIELDS = ("resize_imgs_with_padding", "proj_width", "num_steps")
_MEMORY_FIELDS = ("use_visual_memory", "use_proprioceptive_memory")
_OPENPI_FIELDS = ("action_dim", "action_horizon", "paligemma_variant", "action_expert_variant")
_DEFAULT_TEXT_VARIANT = "gemma_2b"
_DEFAULT_EXPERT_VARIANT = "gemma_300m"

Sizes = TypeVar("Sizes", SiglipConfig, GemmaConfig)


class Fields:
    """Typed access to the fields of one JSON object; errors name the file and the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def _wrong(self, name: str, rule: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: field {name!r} must be {rule}; got {self.data.get(name)!r}. "
            "Correct the file."
        )

    def integer(self, name: str, default: int) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number")
        if not abs(value) < math.inf:  # Python's JSON has NaN and Infinity
            raise self._wrong(name, "a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.data.get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def string(self, name: str, default: str) -> str:
        value = self.data.get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def strings(self, name: str, default: tuple[str, ...] | None) -> tuple[str, ...] | None:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def mapping(self, name: str, *, required: bool = False) -> dict[str, Any] | None:
        value = self.data.get(name)
        if value is None:
            if required:
                raise CheckpointError(
                    f"{self.where}: field {name!r} must be present; got none. "
                    "Use a complete checkpoint folder."
                )
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def resolution(self, name: str, default: tuple[int, int]) -> tuple[int, int]:
        value = self.data.get(name)
        if value is None:
            return default
        ok = isinstance(value, list) and len(value) == 2
        if not ok or not all(isinstance(v, int) and not isinstance(v, bool) for v in value):
            raise self._wrong(name, "two integers [height, width]")
        return (value[0], value[1])


def _sizes(kind: type[Sizes], base: Sizes, table: Mapping[str, Any] | None, where: str) -> Sizes:
    """Return ``base`` with the fields of ``table`` that the config knows; others are ignored."""
    if table is None:
        return base
    fields = Fields(table, where)
    changes: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        if item.name in table:
            current = getattr(base, item.name)
            read = fields.number if isinstance(current, float) else fields.integer
            changes[item.name] = read(item.name, current)
    return dataclasses.replace(base, **changes)


def _variant(fields: Fields, name: str, default: str) -> GemmaConfig:
    value = fields.string(name, default)
    if value not in GEMMA_VARIANTS:
        raise CheckpointError(
            f"{fields.where}: field {name!r} must be one of {', '.join(sorted(GEMMA_VARIANTS))}; "
            f"got {value!r}.{did_you_mean(value, GEMMA_VARIANTS)} Correct the file."
        )
    return GEMMA_VARIANTS[value]


def _architecture(
    folder: Path, fields: Fields, resolution: tuple[int, int]
) -> tuple[SiglipConfig, GemmaConfig, GemmaConfig]:
    text = _variant(fields, "paligemma_variant", _DEFAULT_TEXT_VARIANT)
    expert = _variant(fields, "action_expert_variant", _DEFAULT_EXPERT_VARIANT)
    path = folder / "arch.json"
    if not path.exists():
        return SiglipConfig(image_size=resolution[0]), text, expert
    arch = Fields(read_json_object(path), "arch.json")
    # One step: the config's resolution need not fit the released patch size.
    vision = {"image_size": resolution[0], **(arch.mapping("vision_config") or {})}
    return (
        _sizes(SiglipConfig, SiglipConfig(), vision, "arch.json vision_config"),
        _sizes(GemmaConfig, text, arch.mapping("text_config"), "arch.json text_config"),
        _sizes(GemmaConfig, expert, arch.mapping("expert_config"), "arch.json expert_config"),
    )


def _check_type(data: Mapping[str, Any], model: Model) -> None:
    found = data["type"]
    if found == model:
        return
    if found in MODELS:
        raise CheckpointError(
            f"config.json: field 'type' must be {model!r} for the plugin {model!r}; got "
            f"{found!r}. Run this checkpoint with `--plugin {found}`."
        )
    hint = did_you_mean(found, MODELS) if isinstance(found, str) else ""
    raise CheckpointError(
        f"config.json: field 'type' must be one of {', '.join(sorted(MODELS))}; got {found!r}."
        f"{hint} Use the plugin of that model."
    )


def _refuse_unsupported(fields: Fields) -> None:
    legacy = [name for name in _LEGACY_FIELDS if name in fields.data]
    if legacy:
        raise CheckpointError(
            "config.json must be written by LeRobot 0.4 or later; got the older layout with "
            f"{', '.join(legacy)}, whose weights have other names. Use a current checkpoint of "
            "this policy, or migrate this one with LeRobot."
        )
    for name in _MEMORY_FIELDS:
        if fields.flag(name, False):
            raise CheckpointError(
                f"config.json: field {name!r} must be false; got true. Memory variants are not "
                "supported; use a checkpoint trained without memory."
            )


def _rtc(fields: Fields) -> RTCConfig | None:
    table = fields.mapping("rtc_config")
    if table is None:
        return None
    rtc = Fields(table, "config.json rtc_config")
    base = RTCConfig()
    return RTCConfig(
        enabled=rtc.flag("enabled", base.enabled),
        prefix_attention_schedule=rtc.string(
            "prefix_attention_schedule", base.prefix_attention_schedule
        ).upper(),
        max_guidance_weight=rtc.number("max_guidance_weight", base.max_guidance_weight),
        execution_horizon=rtc.integer("execution_horizon", base.execution_horizon),
        mode=cast(Any, rtc.string("mode", base.mode).lower()),
    )


def _feature_dim(name: str, feature: Mapping[str, Any]) -> int:
    shape = feature.get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or not isinstance(shape[0], int):
        raise CheckpointError(
            f"config.json: feature {name!r} must have the shape [dim]; got {shape!r}. "
            "Correct the file."
        )
    return shape[0]


def _features_of(table: Mapping[str, Any], kind: str, where: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, feature in table.items():
        if not isinstance(feature, dict) or not isinstance(feature.get("type"), str):
            raise CheckpointError(
                f"config.json: {where}[{name!r}] must be an object with a 'type'; got "
                f"{feature!r}. Correct the file."
            )
        if feature["type"] == kind:
            found[name] = feature
    return found


def _read_lerobot(folder: Path, data: Mapping[str, Any], model: Model) -> PiConfig:
    fields = Fields(data, "config.json")
    _check_type(data, model)
    _refuse_unsupported(fields)
    inputs = fields.mapping("input_features", required=True) or {}
    outputs = fields.mapping("output_features") or {}
    cameras = list(_features_of(inputs, "VISUAL", "input_features"))
    empty = fields.integer("empty_cameras", 0)
    if empty > MAX_CAMERAS:
        raise CheckpointError(
            f"config.json: field 'empty_cameras' must be at most {MAX_CAMERAS}; got {empty}. "
            "Correct the file."
        )
    for index in range(empty):
        # Files saved after construction already list the empty cameras.
        key = f"{IMAGE_PREFIX}empty_camera_{index}"
        if key not in cameras:
            cameras.append(key)
    if not cameras:
        raise CheckpointError(
            "config.json: field 'input_features' must list at least one VISUAL feature; got "
            f"{sorted(inputs)}. Use a complete checkpoint."
        )
    states = _features_of(inputs, "STATE", "input_features")
    actions = _features_of(outputs, "ACTION", "output_features")
    state_dim = next((_feature_dim(name, item) for name, item in states.items()), None)
    action_dim = next((_feature_dim(name, item) for name, item in actions.items()), None)
    resolution = fields.resolution("image_resolution", (224, 224))
    vision, text, expert = _architecture(folder, fields, resolution)
    chunk_size = fields.integer("chunk_size", 50)
    return PiConfig(
        model=model,
        family="lerobot",
        vision=vision,
        text=text,
        expert=expert,
        chunk_size=chunk_size,
        n_action_steps=fields.integer("n_action_steps", chunk_size),
        max_state_dim=fields.integer("max_state_dim", 32),
        max_action_dim=fields.integer("max_action_dim", 32),
        num_inference_steps=fields.integer("num_inference_steps", 10),
        min_period=fields.number("min_period", 0.004),
        max_period=fields.number("max_period", 4.0),
        tokenizer_max_length=fields.integer("tokenizer_max_length", 0),
        image_resolution=resolution,
        cameras=tuple(cameras),
        empty_cameras=empty,
        state_dim=state_dim,
        action_dim=action_dim,
        normalization_mapping=_normalization_mapping(fields),
        use_relative_actions=fields.flag("use_relative_actions", False),
        relative_exclude_joints=fields.strings("relative_exclude_joints", ("gripper",)) or (),
        action_feature_names=fields.strings("action_feature_names", None),
        rtc=_rtc(fields),
        rtc_training_max_delay=fields.integer("rtc_training_max_delay", 0),
        dtype=fields.string("dtype", "float32"),
        use_peft=fields.flag("use_peft", False),
    )


def _normalization_mapping(fields: Fields) -> Mapping[str, str] | None:
    table = fields.mapping("normalization_mapping")
    if table is None:
        return None
    reader = Fields(table, "config.json normalization_mapping")
    return {name: reader.string(name, "") for name in table}


def _read_openpi(folder: Path, data: Mapping[str, Any], model: Model) -> PiConfig:
    fields = Fields(data, "config.json")
    missing = [name for name in ("action_dim", "action_horizon") if name not in data]
    if missing:
        raise CheckpointError(
            f"config.json: field {missing[0]!r} must be present in an openpi file; got none. "
            "Convert the checkpoint again."
        )
    width = fields.integer("action_dim", 32)
    horizon = fields.integer("action_horizon", 50)
    resolution = (224, 224)
    if (folder / "arch.json").exists():
        arch = Fields(read_json_object(folder / "arch.json"), "arch.json")
        size = Fields(arch.mapping("vision_config") or {}, "arch.json vision_config").integer(
            "image_size", 224
        )
        resolution = (size, size)
    vision, text, expert = _architecture(folder, fields, resolution)
    return PiConfig(
        model=model,
        family="openpi",
        vision=vision,
        text=text,
        expert=expert,
        chunk_size=horizon,
        n_action_steps=horizon,
        max_state_dim=width,
        max_action_dim=width,
        image_resolution=resolution,
        tokenizer_max_length=fields.integer("tokenizer_max_length", 0),
        cameras=BASE_CAMERAS,
        dtype=fields.string("precision", "float32"),
    )


def read_config(folder: Path, model: Model) -> PiConfig:
    """Return the PiConfig of a LeRobot or openpi checkpoint folder; see PiConfig.from_folder."""
    data = read_json_object(folder / "config.json")
    if "type" in data:
        return _read_lerobot(folder, data, model)
    if any(name in data for name in ("action_horizon", *_OPENPI_FIELDS[2:])) and not (
        "input_features" in data or "output_features" in data
    ):
        return _read_openpi(folder, data, model)
    _refuse_unsupported(Fields(data, "config.json"))
    raise CheckpointError(
        "config.json: field 'type' must be present; got none. Use a LeRobot folder ('type': "
        f"{model!r}) or the output of openpi's PyTorch converter."
    )
