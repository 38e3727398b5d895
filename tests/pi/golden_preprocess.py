"""Checks of the official preprocessing files: every tensor, string and id that is not an input.

Each function takes the path of one case file, derives keys and sizes from its content and raises
AssertionError naming the tensor and the largest difference. Inputs go through the public code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from phyai.models.pi.config import PiConfig
from phyai.models.pi.images import model_image, resize_with_pad_float, resize_with_pad_uint8
from phyai.models.pi.norm_stats import ACTION, STATE, load_stats, openpi_stats
from phyai.models.pi.normalize import (
    OpenpiStats,
    lerobot_normalize,
    lerobot_unnormalize,
    make_bool_mask,
    openpi_normalize,
    openpi_unnormalize,
    relative_mask,
    to_absolute,
    to_relative,
)
from phyai.models.pi.processor import Processor
from phyai.models.pi.prompts import clean, newline_prompt, prompt_parts, state_prompt
from phyai.models.pi.robots import ALOHA, DROID, LIBERO
from phyai.models.pi.tokenizer import PromptTokenizer, find_tokenizer_file
from phyai.types import Observation

FLOAT_ATOL = 1e-6
NORM_RTOL = 1e-6
# One uint8 level in [-1, 1]: the jax resize works on floats, ours rounds to uint8 as PIL does.
LEVEL = 1.01 / 127.5

Tensors = dict[str, NDArray[Any]]


class Compared:
    """Remembers which tensors were used, so that none is forgotten."""

    def __init__(self, path: Path, tensors: Tensors) -> None:
        self.path, self.tensors = path, tensors
        self.used: set[str] = set()

    def take(self, name: str) -> NDArray[Any]:
        """Return an input."""
        assert name in self.tensors, f"{self.path.name}: no tensor {name}"
        self.used.add(name)
        return self.tensors[name]

    def close(self, name: str, mine: Any, *, atol: float, rtol: float = 0.0) -> None:
        want = self.take(name)
        mine = np.asarray(mine)
        assert mine.shape == want.shape, f"{self.path.name} {name}: shape {mine.shape}"
        error = np.abs(mine.astype(np.float64) - want.astype(np.float64))
        ok = error <= atol + rtol * np.abs(want.astype(np.float64))
        assert ok.all(), f"{self.path.name} {name}: max error {error.max():.3g}"

    def equal(self, name: str, mine: Any) -> None:
        self.close(name, mine, atol=0.0)

    def done(self) -> None:
        left = sorted(set(self.tensors) - self.used)
        assert not left, f"{self.path.name}: not compared: {left}"


def _load(path: Path) -> Compared:
    return Compared(path, load_file(path))


def _beside(path: Path, name: str) -> Path:
    """Return ``name`` beside the case or up to three folders above it."""
    for folder in path.absolute().parents[:4]:
        if (folder / name).exists():
            return folder / name
    raise AssertionError(f"{path}: no {name} beside it or above it")


def _tokenizer(path: Path) -> PromptTokenizer:
    return PromptTokenizer.from_path(_beside(path, "tokenizer"))


# ---------------------------------------------------------------- LeRobot


def check_preprocess_lerobot(path: Path) -> None:
    """Image resize, four normalisation modes and relative actions of LeRobot."""
    case = _load(Path(path))
    for name in sorted(n for n in case.tensors if n.endswith(".in_uint8_chw")):
        stem = name.removesuffix(".in_uint8_chw")
        want = case.tensors[f"{stem}.model_input_chw"]
        image = np.ascontiguousarray(case.take(name).transpose(1, 2, 0))
        size = (int(want.shape[-2]), int(want.shape[-1]))
        mine = model_image(image, size, "lerobot")
        case.close(f"{stem}.model_input_chw", mine, atol=FLOAT_ATOL)
    _check_lerobot_norms(case)
    _check_relative(case)
    case.done()


def _check_lerobot_norms(case: Compared) -> None:
    stats: dict[str, dict[str, NDArray[Any]]] = {}
    for name in [n for n in case.tensors if n.startswith("norm.stats.")]:
        feature, stat = name.removeprefix("norm.stats.").rsplit(".", 1)
        stats.setdefault(feature, {})[stat] = case.take(name)
    modes = sorted({n.split(".")[1] for n in case.tensors if n.startswith("norm.")})
    for mode in modes:
        for kind, feature in (("state", STATE), ("action", ACTION)):
            if f"norm.{mode}.{kind}" in case.tensors:
                x = case.take(f"norm.in_{kind}")
                mine = lerobot_normalize(x, stats[feature], mode)
                case.close(f"norm.{mode}.{kind}", mine, atol=FLOAT_ATOL, rtol=NORM_RTOL)
            if f"norm.{mode}.unnorm_{kind}" in case.tensors:
                x = case.take(f"norm.in_{kind}")
                mine = lerobot_unnormalize(x, stats[feature], mode)
                case.close(f"norm.{mode}.unnorm_{kind}", mine, atol=FLOAT_ATOL, rtol=NORM_RTOL)


def _check_relative(case: Compared) -> None:
    if "rel.mask" not in case.tensors:
        return
    mask = case.tensors["rel.mask"].astype(bool)
    # The names that give this mask: excluded dims are called grippers.
    names = tuple(f"joint_{i}.pos" if on else f"Gripper_{i}.pos" for i, on in enumerate(mask))
    mine = relative_mask(len(mask), names, ("gripper",))
    case.equal("rel.mask", np.asarray(mine))
    actions, state = case.take("rel.in_action"), case.take("rel.in_state")
    case.close("rel.absolute", to_absolute(actions, state, mine), atol=FLOAT_ATOL)
    case.close("rel.relative", to_relative(actions, state, mine), atol=FLOAT_ATOL)


# ---------------------------------------------------------------- openpi


def check_preprocess_images_openpi(path: Path) -> None:
    """The three resizes of openpi: PIL on uint8, torch without and jax with antialiasing."""
    case = _load(Path(path))
    for name in sorted(n for n in case.tensors if n.endswith(".in_uint8")):
        stem = name.removesuffix(".in_uint8")
        image = case.take(name)
        pil = f"{stem}.openpi_client_pil_uint8"
        size = _hw(case.tensors[pil])
        resized = resize_with_pad_uint8(image, size)
        case.close(pil, resized, atol=1.0)
        model = model_image(image, size, "openpi").numpy().transpose(1, 2, 0)
        if f"{stem}.openpi_model_input_f32" in case.tensors:
            want = case.tensors[f"{stem}.openpi_model_input_f32"]
            assert _hw(want) == size
            case.close(f"{stem}.openpi_model_input_f32", model, atol=LEVEL)
        if f"{stem}.openpi_jax_f32_hwc" in case.tensors:
            case.close(f"{stem}.openpi_jax_f32_hwc", model, atol=LEVEL)
        if f"{stem}.openpi_torch_f32_hwc" in case.tensors:
            scaled = torch.from_numpy(image.astype(np.float32).transpose(2, 0, 1)) / 255 * 2 - 1
            mine = resize_with_pad_float(scaled, size, pad=-1.0, value_range=(-1.0, 1.0))
            case.close(
                f"{stem}.openpi_torch_f32_hwc", mine.numpy().transpose(1, 2, 0), atol=5 * FLOAT_ATOL
            )
    case.done()


def _hw(image: NDArray[Any]) -> tuple[int, int]:
    return int(image.shape[0]), int(image.shape[1])


def check_preprocess_norm_openpi(path: Path) -> None:
    """z-score and quantile normalisation, stored statistics and the zero-padded ones."""
    case = _load(Path(path))
    loaded = load_stats(_beside(case.path, "norm_stats.json"))
    for kind, feature in (("state", STATE), ("actions", ACTION)):
        for stat in ("mean", "std", "q01", "q99"):
            case.close(f"stats.{kind}.{stat}", loaded[feature][stat], atol=0.0)
    plain = {kind: openpi_stats(loaded, name) for kind, name in (("state", STATE),)}
    plain["actions"] = openpi_stats(loaded, ACTION)
    _check_openpi_modes(case, "stats", plain)
    if any(name.startswith("stats32.") for name in case.tensors):
        width = case.tensors["in.model_state"].shape[-1]
        state = plain["state"]
        assert state is not None
        _check_openpi_modes(case, "stats32", {**plain, "state": _padded(state, width)})
    case.done()


def _padded(stats: OpenpiStats, width: int) -> OpenpiStats:
    def pad(values: Any) -> NDArray[Any]:
        return np.pad(np.asarray(values), (0, width - len(values)))

    return OpenpiStats(pad(stats.mean), pad(stats.std), pad(stats.q01), pad(stats.q99))


def _check_openpi_modes(
    case: Compared, prefix: str, stats: Mapping[str, OpenpiStats | None]
) -> None:
    for mode, quantiles in (("zscore", False), ("quantile", True)):
        for kind in ("state", "actions"):
            mine = openpi_normalize(case.take(f"in.{kind}"), stats[kind], use_quantiles=quantiles)
            case.close(f"{prefix}.{mode}.norm_{kind}", mine, atol=1e-9, rtol=NORM_RTOL)
            model = case.take(f"in.model_{kind}")
            mine = openpi_unnormalize(model, stats[kind], use_quantiles=quantiles)
            case.close(f"{prefix}.{mode}.unnorm_{kind}", mine, atol=1e-9, rtol=NORM_RTOL)


def check_preprocess_robot_openpi(path: Path) -> None:
    """Relative actions and the LIBERO, DROID and ALOHA contracts."""
    case = _load(Path(path))
    for name in sorted(n for n in case.tensors if re.match(r"(delta|absolute)_-?\d", n)):
        kind, *runs = name.split("_")
        mask = make_bool_mask(*(int(run) for run in runs))
        convert = to_relative if kind == "delta" else to_absolute
        mine = convert(case.take("in.actions"), case.take("in.state"), mask)
        case.close(name, mine, atol=FLOAT_ATOL)
    _check_aloha(case)
    _check_droid(case)
    _check_libero(case)
    case.done()


def _image_mask(slots: Mapping[str, Any]) -> NDArray[np.bool_]:
    return np.array([camera in slots for camera in PiConfig.default("pi0").camera_names])


def _check_aloha(case: Compared) -> None:
    image = case.take("aloha.in_cam_high_chw")
    mask = case.tensors["aloha.image_mask"]
    others = ("cam_left_wrist", "cam_right_wrist")
    images = {"cam_high": image, "cam_low": image}
    images.update({name: image for name, on in zip(others, mask[1:], strict=True) if on})
    inputs = ALOHA.to_model({"images": images, "state": case.take("aloha.in_state")})
    case.equal("aloha.base_0_rgb_hwc", inputs.images["base_0_rgb"])
    case.equal("aloha.image_mask", _image_mask(inputs.images))
    case.close("aloha.state_pi", inputs.state, atol=1e-9)
    actions = ALOHA.encode_actions(case.take("aloha.in_actions"))
    case.close("aloha.actions_pi", actions, atol=1e-9)
    commands = ALOHA.from_model(case.take("aloha.model_actions"))
    case.close("aloha.robot_actions", commands, atol=1e-9)


def _check_droid(case: Compared) -> None:
    image = np.zeros((24, 30, 3), np.uint8)
    inputs = DROID.to_model(
        {
            "observation/exterior_image_1_left": image,
            "observation/wrist_image_left": image,
            "observation/joint_position": case.take("droid.joint"),
            "observation/gripper_position": case.take("droid.gripper"),
            "prompt": b"open the drawer",
        }
    )
    case.equal("droid.state", inputs.state)
    case.equal("droid.image_mask", _image_mask(inputs.images))
    assert inputs.prompt == "open the drawer"


def _check_libero(case: Compared) -> None:
    image = np.zeros((24, 30, 3), np.uint8)
    inputs = LIBERO.to_model(
        {
            "observation/image": image,
            "observation/wrist_image": image,
            "observation/state": np.zeros(LIBERO.state_dim),
        }
    )
    case.equal("libero.image_mask", _image_mask(inputs.images))


# ---------------------------------------------------------------- prompts


def _entries(path: Path) -> list[dict[str, Any]]:
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(entries, list)
    assert entries
    return entries


def _lengths(entry: Mapping[str, Any], pattern: str) -> Iterator[tuple[str, int]]:
    for key in entry:
        match = re.fullmatch(pattern + r"_(\d+)", key)
        if match:
            yield key, int(match[1])


class Strings:
    """Compares one entry of a prompts file and remembers which keys were used."""

    def __init__(self, path: Path, index: int, entry: Mapping[str, Any]) -> None:
        self.where, self.entry = f"{path.name}[{index}]", entry
        self.used = {"prompt", "state_f32"}

    def equal(self, key: str, mine: Any) -> None:
        self.used.add(key)
        assert self.entry[key] == mine, f"{self.where} {key}: {mine!r} != {self.entry[key]!r}"

    def done(self) -> None:
        left = sorted(set(self.entry) - self.used)
        assert not left, f"{self.where}: not compared: {left}"


def check_prompts_lerobot(path: Path) -> None:
    """LeRobot's prompt strings and token ids, and whether openpi gives the same ids."""
    path = Path(path)
    tokenizer = _tokenizer(path)
    for index, entry in enumerate(_entries(path)):
        case = Strings(path, index, entry)
        prompt = entry["prompt"]
        model = "pi0" if "pi0_string" in entry else "pi05"
        state = np.asarray(entry["state_f32"], np.float32) if model == "pi05" else None
        in_prompt = model == "pi05"
        mine = _parts(prompt, "lerobot", model, in_prompt, state)
        if model == "pi0":
            case.equal("pi0_string", newline_prompt(prompt))
        else:
            case.equal("pi05_string", "".join(mine))
            case.equal("equals_openpi", mine == _parts(prompt, "openpi", model, in_prompt, state))
            for key, width in _lengths(entry, "pi05_string_state_padded_to"):
                case.equal(key, state_prompt(prompt, state, state_prompt_dim=width))
        openpi = _parts(prompt, "openpi", model, in_prompt, state)
        for key, length in list(_lengths(entry, "hf_tokens")):
            ids, _ = tokenizer.encode(mine, length, overlong="truncate")
            case.equal(key, ids.tolist())
            theirs, _ = tokenizer.encode(openpi, length, overlong="truncate")
            if f"hf_equals_openpi_{length}" in entry:
                case.equal(f"hf_equals_openpi_{length}", ids.tolist() == theirs.tolist())
        case.done()


def _parts(prompt: str, family: str, model: str, in_prompt: bool, state: Any) -> tuple[str, ...]:
    return prompt_parts(prompt, family=family, model=model, state_in_prompt=in_prompt, state=state)


def check_prompts_openpi(path: Path) -> None:
    """openpi's encode calls, strings, token ids and mask sums, with every tokenizer file."""
    path = Path(path)
    folder = _beside(path, "tokenizer")
    files = [f for f in (folder / "tokenizer.json", folder / "tokenizer.model") if f.exists()]
    assert files, f"{folder}: no tokenizer file"
    for file in files:
        tokenizer = PromptTokenizer.from_path(file)
        for index, entry in enumerate(_entries(path)):
            _check_openpi_entry(path, index, entry, tokenizer)


def _check_openpi_entry(
    path: Path, index: int, entry: Mapping[str, Any], tokenizer: PromptTokenizer
) -> None:
    case = Strings(path, index, entry)
    state = np.asarray(entry["state_f32"], np.float32)
    pi0 = _parts(entry["prompt"], "openpi", "pi0", False, None)
    pi05 = _parts(entry["prompt"], "openpi", "pi05", True, state)
    case.equal("pi0_encode_calls", list(pi0))
    assert pi0[0] == clean(entry["prompt"])
    case.equal("pi05_string", "".join(pi05))
    for model, parts in (("pi0", pi0), ("pi05", pi05)):
        for key, length in list(_lengths(entry, f"{model}_tokens")):
            ids, count = tokenizer.encode(parts, length, overlong="truncate")
            case.equal(key, ids.tolist())
            case.equal(f"{model}_mask_sum_{length}", count)
    case.done()


# ---------------------------------------------------------------- end to end


def check_e2e_processing(path: Path) -> None:
    """Raw observation -> tokens and state, and model actions -> robot actions, per row."""
    path = Path(path)
    with safe_open(path, "np") as file:
        meta = file.metadata() or {}
    case = _load(path)
    model = meta["kind"]
    folder = path.parent
    processors = _processor_folder(folder, meta.get("relative_actions") == "True")
    config = PiConfig.from_folder(folder, model)  # type: ignore[arg-type]
    processor = Processor.from_checkpoint(
        folder,
        config,
        processor_dir=processors,
        tokenizer=find_tokenizer_file(_beside(path, "tokenizer")),
    )
    assert processor.max_length == int(meta["tokenizer_max_length"])
    row = processor.row(e2e_observation(case.take, case.tensors, meta["task"]))
    case.take("noise")
    assert meta["prompt_after_preprocess"] == str([row.prompt_text])
    missing = [c for c, on in zip(config.cameras, row.image_mask.tolist(), strict=True) if not on]
    assert missing == [c for c in meta["missing_camera"].split(",") if c]
    case.equal("pre.tokens", row.tokens.numpy()[None])
    valid = np.arange(processor.max_length) < row.length
    case.equal("pre.token_mask", valid[None])
    dim = case.tensors["pre.state"].shape[-1]
    case.close("pre.state", row.state.numpy()[None, :dim], atol=FLOAT_ATOL, rtol=NORM_RTOL)
    assert not row.state.numpy()[dim:].any()
    actions = case.take("model.actions")
    assert actions.shape[0] == 1
    commands = processor.actions(actions[0], row)
    case.close("post.actions", commands[None], atol=FLOAT_ATOL, rtol=NORM_RTOL)
    case.done()


def _processor_folder(root: Path, relative: bool) -> Path:
    """Return the folder of processor files whose actions are relative, or absolute, as asked."""
    for file in sorted(root.rglob("policy_postprocessor.json")):
        steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
        enabled = any(
            step["registry_name"] == "absolute_actions_processor" and step["config"]["enabled"]
            for step in steps
        )
        if enabled == relative:
            return file.parent
    raise AssertionError(f"{root}: no processor files with relative actions {relative}")


def e2e_observation(
    take: Callable[[str], NDArray[Any]], tensors: Tensors, task: str
) -> Observation:
    """Return the observation of an e2e case: one row of its ``raw.*`` tensors."""
    prefix = "raw.observation.images."
    images = {n.removeprefix("raw."): take(n) for n in sorted(tensors) if n.startswith(prefix)}
    return Observation(images=images, state=take("raw.observation.state"), prompt=task)
