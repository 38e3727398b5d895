"""Reads ``config.json`` and ``preprocessor_config.json`` of the two tower folders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from phyai import hub
from phyai.errors import CheckpointError
from phyai.json_files import read_json_object
from phyai.layers import VisionConfig
from phyai.models.minicpm_robot_track.vision.dinov3 import DinoConfig
from phyai.models.minicpm_robot_track.vision.pixels import HALF, IMAGENET, PixelScale

CONFIG_FILE = "config.json"
DINO_TYPE = "dinov3_vit"
SIGLIP_TYPE, SIGLIP_VISION_TYPE = "siglip", "siglip_vision_model"
MAX_SIZE = 65536
# The file format's defaults: a file leaves out what equals them.
_SIGLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "patch_size": 16,
    "image_size": 224,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
}
_SQUARE = ("patch_size", "image_size")


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of both towers, and how each wants its pixels.

    >>> sizes = TowerSizes.released()
    >>> sizes.image_size, sizes.feature_dim
    (384, 1536)
    """

    dino: DinoConfig
    siglip: VisionConfig
    dino_pixels: PixelScale = IMAGENET
    siglip_pixels: PixelScale = HALF

    @classmethod
    def released(cls) -> TowerSizes:
        """Return the sizes of DINOv3 S/16 and of SigLIP so400m-patch14-384."""
        siglip = VisionConfig(1152, 27, 16, 4304, patch_size=14, image_size=384)
        return cls(DinoConfig(num_register_tokens=4), siglip)

    @classmethod
    def from_folders(cls, dino_dir: str | Path, siglip_dir: str | Path) -> TowerSizes:
        """Return the sizes two released folders, or hub ids, describe.

        Raises: CheckpointNotFound for an absent folder or file; CheckpointError and ConfigError
            for another model, damaged values, and what is not supported.
        """
        dino, siglip = tower_folder(dino_dir, "dino_dir"), tower_folder(siglip_dir, "siglip_dir")
        return cls(
            read_dino(dino / CONFIG_FILE),
            read_siglip(siglip / CONFIG_FILE),
            PixelScale.from_folder(dino, IMAGENET),
            PixelScale.from_folder(siglip, HALF),
        )

    @property
    def image_size(self) -> int:
        """Return the side of the square frames both towers see: SigLIP's positions settle it."""
        return self.siglip.image_size

    @property
    def feature_dim(self) -> int:
        """Return the width of a vision token: DINOv3's features, then SigLIP's."""
        return self.dino.hidden_size + self.siglip.hidden_size


def tower_folder(source: str | Path, name: str) -> Path:
    """Return the local folder of a tower.

    Raises: CheckpointNotFound; CheckpointError for a file.
    """
    path = hub.resolve(source, purpose=f"vision tower ({name})")
    if not path.is_dir():
        raise CheckpointError(
            f"{name} must be a folder with {CONFIG_FILE} and safetensors; got {str(path)!r}. "
            "Name the folder that holds the file."
        )
    return path


def read_dino(path: Path) -> DinoConfig:
    """Return the sizes in a DINOv3 folder's ``config.json``; errors as ``from_folders``."""
    data = read_json_object(path)
    if data.get("model_type") != DINO_TYPE:
        raise CheckpointError(
            f"model_type in {path} must be {DINO_TYPE!r}; got {data.get('model_type')!r}. "
            "Use a vision transformer of DINOv3, such as facebook/dinov3-vits16-pretrain-lvd1689m."
        )
    defaults = {f.name: f.default for f in fields(DinoConfig)}
    return DinoConfig(**_values(data, defaults, path))


def read_siglip(path: Path) -> VisionConfig:
    """Return the vision sizes in a SigLIP folder's ``config.json``, of the whole model or not."""
    data = read_json_object(path)
    kind = data.get("model_type")
    if kind not in (SIGLIP_TYPE, SIGLIP_VISION_TYPE):
        raise CheckpointError(
            f"model_type in {path} must be {SIGLIP_TYPE!r} or {SIGLIP_VISION_TYPE!r}; got "
            f"{kind!r}. Use a SigLIP model such as google/siglip-so400m-patch14-384."
        )
    if kind == SIGLIP_TYPE:
        data = data.get("vision_config") or {}
        if not isinstance(data, dict):
            raise _bad("vision_config", path, "an object", data)
    act = data.get("hidden_act", "gelu_pytorch_tanh")
    if act != "gelu_pytorch_tanh":
        raise _bad("hidden_act", path, "'gelu_pytorch_tanh'", act)
    return VisionConfig(**_values(data, _SIGLIP_DEFAULTS, path))


def _values(data: Mapping[str, Any], defaults: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return data's values of the names in ``defaults``, each of its default's type."""
    return {name: _value(data.get(name, default), name, default, path)
            for name, default in defaults.items()}  # fmt: skip


def _value(value: Any, name: str, default: Any, path: Path) -> Any:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise _bad(name, path, "true or false", value)
    elif isinstance(default, int):
        least = 0 if name == "num_register_tokens" else 1
        if name in _SQUARE and isinstance(value, list) and len({*map(str, value)}) == 1:
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_SIZE:
            what = "an integer, or equal ones," if name in _SQUARE else "an integer"
            raise _bad(name, path, f"{what} from {least} to {MAX_SIZE}", value)
    elif isinstance(default, float):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise _bad(name, path, "a positive number", value)
        value = float(value)
    elif not isinstance(value, str):
        raise _bad(name, path, "a string", value)
    return value


def _bad(name: str, path: Path, rule: str, got: Any) -> CheckpointError:
    return CheckpointError(f"{name} in {path} must be {rule}; got {got!r}. Correct the file.")
