"""Sizes of the backbone: from a Qwen3-VL ``config.json``, or those of Cosmos-Reason2-2B."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai.backbones.qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig
from phyai.errors import CheckpointError, CheckpointNotFound
from phyai.json_files import read_json_object

FILES = ("qwen3_vl_config.json", "config.json")
"""Names a backbone folder's config may have, the more specific one first."""
SUBFOLDER = "backbone"
"""Where a checkpoint may keep the backbone's own files."""
MODEL_TYPE = "qwen3_vl"

RELEASED: Mapping[str, Any] = {
    "model_type": MODEL_TYPE,
    "image_token_id": 151655,
    "text_config": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "pad_token_id": 151643,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [5, 11, 17],
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""Cosmos-Reason2-2B, in the form of its config.json; its repository is gated."""
RELEASED_NAMES = ("nvidia/Cosmos-Reason2-2B", "Qwen/Qwen3-VL-2B")
"""Prefixes of ``model_name`` that have those sizes."""
_PAD_TOKEN_ID = 151643


def backbone_of(
    data: Mapping[str, Any],
) -> tuple[Qwen3VLVisionConfig, Qwen3VLTextConfig]:
    """Return the two configs of a Qwen3-VL config; ConfigError for sizes that cannot work."""
    return (
        Qwen3VLVisionConfig.from_json(data["vision_config"]),
        Qwen3VLTextConfig.from_json(data["text_config"]),
    )


def token_ids(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``image_token_id`` and ``pad_token_id`` of a Qwen3-VL config."""
    pad = data["text_config"].get("pad_token_id", data.get("pad_token_id"))
    return {
        "image_token_id": data.get("image_token_id", RELEASED["image_token_id"]),
        "pad_token_id": _PAD_TOKEN_ID if pad is None else pad,
    }


def read_backbone(folder: Path, backbone_dir: Path | None, model_name: str) -> Mapping[str, Any]:
    """Return the backbone's config as stored; see ``GrootConfig.from_folder``.

    Raises: CheckpointNotFound when ``backbone_dir`` holds none, or when nothing says the sizes of
    ``model_name``; CheckpointError for a file that is no Qwen3-VL config.
    """
    if backbone_dir is not None:
        found = _first(backbone_dir, FILES)
        if found is None:
            raise CheckpointNotFound(
                f"backbone_dir must hold {' or '.join(FILES)}; {str(backbone_dir)!r} has none. "
                f"Pass the folder of {model_name}."
            )
        return _read(found)
    # A checkpoint's own config.json is the policy's, so only the specific name counts there.
    found = _first(folder, FILES[:1]) or _first(folder / SUBFOLDER, FILES)
    if found is not None:
        return _read(found)
    if model_name.startswith(RELEASED_NAMES):
        return RELEASED
    raise CheckpointNotFound(
        f"backbone {model_name!r} must have its config.json; its sizes are not known here. "
        "Pass backbone_dir."
    )


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read(path: Path) -> Mapping[str, Any]:
    data = read_json_object(path)
    if data.get("model_type") != MODEL_TYPE or not all(
        isinstance(data.get(part), dict) for part in ("vision_config", "text_config")
    ):
        raise CheckpointError(
            f"{path} must be the config of a Qwen3-VL model with vision_config and text_config; "
            f"got model_type {data.get('model_type')!r}. Pass the backbone's folder."
        )
    return data
