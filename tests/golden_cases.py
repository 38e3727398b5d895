"""Find golden case files below a folder and tell their kinds.

A kind comes from the prefix (`case_`, `track_case_`, `preprocess_`), the metadata and the tensor
names or keys inside; the rest of the file name, sizes and seeds mean nothing. What fits no kind, or
more than one, has kind `UNKNOWN` with the reason in `problem`, and fails the run.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIXES = ("case_", "track_case_", "preprocess_")
SUFFIXES = (".safetensors", ".json")
FAMILIES = ("pi0", "pi05")
UNKNOWN = "unknown"
ROOT_FILES = ("config.json", "model_index.json")
"""What tells the folder of a set's checkpoint."""
_MAX_HEADER_BYTES = 100_000_000
_PREPROCESS_INPUT = re.compile(
    r"in\..*|[a-z0-9]+\.in_.*|norm\.stats\..*|aloha\.model_actions|droid\.(joint|gripper)"
    r"|prompt|state_f32"
    r"|img_\w+\.in|\w+\.\w+\.\w+\.(state_in|action_norm_in)\..*|modality_configs|statistics"
)


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """One case file.

    set_root: nearest folder at or above the file, within the discovered folder, that holds a
        checkpoint's config.json or model_index.json; None when there is none.
    names: tensor names of a .safetensors file, keys of the records of a .json file.
    """

    path: Path
    set_root: Path | None
    kind: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    problem: str = ""


def discover(folder: Path) -> list[GoldenCase]:
    """Return every case at the top of ``folder`` and below it, sorted by path."""
    return [_read(path, folder) for path in sorted(_case_files(folder))]


def outputs(case: GoldenCase) -> tuple[str, ...]:
    """Return the tensors or keys of a case that are results, so have to be compared."""
    if case.path.name.startswith("preprocess_"):
        return tuple(n for n in case.names if not _PREPROCESS_INPUT.fullmatch(n))
    inputs: tuple[str, ...] = ("in.", "raw.")
    return tuple(n for n in case.names if not n.startswith(inputs) and n != "noise")


def _case_files(folder: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for top, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(top)
        if real in seen:  # a loop of symbolic links
            folders.clear()
            continue
        seen.add(real)
        for name in files:
            if name.startswith(PREFIXES) and name.endswith(SUFFIXES):
                yield Path(top) / name


def _read(path: Path, folder: Path) -> GoldenCase:
    root = _set_root(path, folder)
    try:
        metadata, names = _header(path) if path.suffix == ".safetensors" else _keys(path)
    except (OSError, ValueError, AttributeError, TypeError) as error:
        return GoldenCase(path, root, UNKNOWN, problem=f"cannot be read: {error}")
    kinds = [kind for kind, fits in _rules(path) if fits(frozenset(names), metadata)]
    kind = kinds[0] if len(kinds) == 1 else UNKNOWN
    problem = "" if len(kinds) == 1 else f"fits {kinds or 'no kind'}"
    family = metadata.get("kind")
    if family is not None and family not in FAMILIES:
        kind, problem = UNKNOWN, f"is of the family {family!r}, not of {FAMILIES}"
    return GoldenCase(path, root, kind, metadata, names, problem)


def _set_root(path: Path, folder: Path) -> Path | None:
    for parent in path.parents:
        if any((parent / name).is_file() for name in ROOT_FILES):
            return parent
        if parent == folder:
            break
    return None


def _header(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError("no safetensors header")
        (length,) = struct.unpack("<Q", start)
        if length > min(_MAX_HEADER_BYTES, path.stat().st_size - 8):
            raise ValueError("the safetensors header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(length))
    metadata: dict[str, str] = header.pop("__metadata__", {})
    return metadata, tuple(sorted(header))


def _keys(path: Path) -> tuple[dict[str, str], tuple[str, ...]]:
    records = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(records, dict):
        records = [records]
    return {}, tuple(sorted({key for record in records for key in record}))


Names = frozenset[str]
Rule = Callable[[Names, Mapping[str, str]], bool]


def _some(names: Names, *, start: str = "", end: str = "") -> bool:
    return any(name.startswith(start) and name.endswith(end) for name in names)


def _is_rl(names: Names, meta: Mapping[str, str]) -> bool:
    return "in.step_noise" in names or "modes" in meta


def _is_trained(names: Names, meta: Mapping[str, str]) -> bool:
    return meta.get("mode") == "trained" and "in.prev_chunk_left_over" in names


def _is_guided(names: Names, meta: Mapping[str, str]) -> bool:
    return meta.get("mode", "guided") == "guided" and "in.prev_chunk_left_over" in names


def _is_end_to_end(names: Names, meta: Mapping[str, str]) -> bool:
    return _some(names, start="raw.observation.") and "post.actions" in names


def _is_policy(names: Names, meta: Mapping[str, str]) -> bool:
    return "camera_order" in meta or _some(names, start="in.observation.images.")


def _is_bf16(names: Names, meta: Mapping[str, str]) -> bool:
    return _is_plain(names) and meta.get("dtype", "float32").startswith("bfloat16")


def _is_base(names: Names, meta: Mapping[str, str]) -> bool:
    return _is_plain(names) and meta.get("dtype", "float32") == "float32"


def _is_plain(names: Names) -> bool:
    special = {"in.step_noise", "in.prev_chunk_left_over"}
    return {"in.images", "in.tokens", "in.noise", "actions"} <= names and not special & names


def _is_groot(names: Names, meta: Mapping[str, str]) -> bool:
    wanted = {"in.pixel_values", "in.image_grid_thw", "in.input_ids", "out.action_pred"}
    return wanted <= names and "num_inference_timesteps" in meta


_CASE_RULES: tuple[tuple[str, Rule], ...] = (
    ("rl", _is_rl),
    ("rtc_trained", _is_trained),
    ("rtc_guided", _is_guided),
    ("e2e", _is_end_to_end),
    ("policy", _is_policy),
    ("bf16", _is_bf16),
    ("base", _is_base),
    ("groot", _is_groot),
)
_TENSOR_RULES: tuple[tuple[str, Rule], ...] = (
    (
        "preprocess_lerobot",
        lambda names, _: (
            _some(names, end=".in_uint8_chw") or bool({"norm.in_state", "rel.in_state"} & names)
        ),
    ),
    ("preprocess_images_openpi", lambda names, _: _some(names, end=".openpi_client_pil_uint8")),
    (
        "preprocess_norm_openpi",
        lambda names, _: (
            _some(names, start="stats.quantile.") or _some(names, start="stats.zscore.")
        ),
    ),
    (
        "preprocess_robot_openpi",
        lambda names, _: any(
            _some(names, start=robot) for robot in ("aloha.", "droid.", "libero.")
        ),
    ),
)
_GROOT_TENSOR_RULES: tuple[tuple[str, Rule], ...] = (
    ("groot_images", lambda names, _: _some(names, start="img_", end=".in")),
    ("groot_state_action", lambda names, _: any(".state_in." in name for name in names)),
    (
        "groot_pipeline",
        lambda names, meta: "in.normalized_action" in names and "embodiment_tag" in meta,
    ),
)
_COSMOS_RULES: tuple[tuple[str, Rule], ...] = (
    (
        "cosmos_evaluation",
        lambda names, _: {"input_ids", "video", "timestep", "velocity_video"} <= names,
    ),
    ("cosmos_denoise", lambda names, _: {"cond_ids", "x0_video", "step.cond_v"} <= names),
    ("cosmos_pipeline", lambda names, _: {"cond_ids", "init_video", "step_video"} <= names),
    (
        "cosmos_droid_request",
        lambda names, _: {"canvas0", "server_action", "x0_latent_first"} <= names,
    ),
    (
        "cosmos_droid_preprocess",
        lambda names, _: {"action_model", "image_size", "domain_id"} <= names,
    ),
    ("cosmos_sampler", lambda names, _: "x_init" in names),
    ("cosmos_vae", lambda names, _: {"pixels", "enc_moments", "latent_raw"} <= names),
    ("cosmos_sound", lambda names, _: {"latent", "waveform"} <= names),
    ("cosmos_rope", lambda names, _: {"position_ids", "cos", "sin", "time.t"} <= names),
)
_MINICPM_PROMPT = {"input_ids", "pixel_values", "target_sizes"}
_MINICPM_RULES: tuple[tuple[str, Rule], ...] = (
    ("minicpm_gdn_op", lambda names, _: {"q", "k", "v", "g", "beta"} <= names),
    ("minicpm_text_layers", lambda names, _: {"x", "y", "attn_layer_index"} <= names),
    (
        "minicpm_vision",
        lambda names, _: {"pixel_values", "target_sizes"} <= names and "input_ids" not in names,
    ),
    (
        "minicpm_vlm",
        lambda names, _: names >= _MINICPM_PROMPT and "actions" not in names,
    ),
    (
        "minicpm_action",
        lambda names, _: {"vl_embs", "state", "noise", "actions"} <= names,
    ),
    ("minicpm_e2e", lambda names, _: names >= {*_MINICPM_PROMPT, "state", "noise", "actions"}),
    (
        "minicpm_preprocess",
        lambda names, _: bool(names) and all(re.fullmatch(r"\d+\.\w+", n) for n in names),
    ),
)
_MINICPM_RECORD_RULES: tuple[tuple[str, Rule], ...] = (
    ("minicpm_preprocess_facts", lambda names, _: "images" in names),
    ("minicpm_layout", lambda names, _: "cases" in names),
)
_TRACK_RULES: tuple[tuple[str, Rule], ...] = (
    (
        "minicpm_track_policy",
        lambda names, _: {"coarse_tokens", "fine_tokens", "trajectory"} <= names,
    ),
    ("minicpm_track_pool", lambda names, _: {"dino_tokens", "siglip_tokens"} <= names),
)
_RECORD_RULES: tuple[tuple[str, Rule], ...] = (
    (
        "groot_modalities",
        lambda names, _: {"modality_configs", "statistics"} <= names,
    ),
    ("prompts_lerobot", lambda names, _: _some(names, start="hf_tokens_")),
    ("prompts_openpi", lambda names, _: any(_some(names, start=f"{f}_tokens_") for f in FAMILIES)),
)


def _rules(path: Path) -> tuple[tuple[str, Rule], ...]:
    if path.name.startswith("case_"):
        if path.suffix != ".safetensors":
            return _MINICPM_RECORD_RULES
        return _CASE_RULES + _MINICPM_RULES + _COSMOS_RULES
    if path.name.startswith("track_case_") and path.suffix == ".safetensors":
        return _TRACK_RULES
    if path.name.startswith("preprocess_"):
        if path.suffix != ".safetensors":
            return _RECORD_RULES
        return _TENSOR_RULES + _GROOT_TENSOR_RULES
    return ()
