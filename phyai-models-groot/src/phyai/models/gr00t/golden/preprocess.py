"""Golden cases of preprocessing: image recipes, states and actions, the whole pipeline.

A file's kind is told by its tensor names. Every tensor is an input, or compared with what this
package computes for it; a result that no rule knows is infinitely wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, absolute, close, exact, unknown
from phyai.json_files import read_json_object
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.processing.backbone import BackboneSource
from phyai.models.gr00t.processing.images import ImageRecipe
from phyai.models.gr00t.processing.processor import GrootRow, Processor
from phyai.models.gr00t.processing.prompts import IMAGE
from phyai.models.gr00t.processing.robot import Robot
from phyai.models.gr00t.processing.settings import FLAGS, ProcessorSettings
from phyai.types import Observation

STATE_ACTION_ATOL = STATE_ACTION_RTOL = 1e-6
PIXEL_ATOL = 1e-6
"""Patches are an affine function of equal pixels."""
LEVEL_ATOL = 1.0
"""Torchvision's resize may round to the next level on another processor."""
STATISTICS = "preprocess_state_action.json"

_SHARED = ("max_state_dim", "max_action_dim")


@dataclass(frozen=True)
class Preprocess:
    """One preprocessing file: its tensors and metadata, and the folder of its set."""

    path: Path
    root: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor as an array.  Raises: CheckpointError."""
        if name not in self.tensors:
            raise CheckpointError(
                f"golden case {self.path.name} must hold {name!r}, which its results need; got "
                f"{', '.join(sorted(self.tensors))}. Copy the golden set again."
            )
        return np.asarray(self.tensors[name].numpy())

    def beside(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object of the same folder, else of the set's.  Raises: CheckpointError."""
        near = self.path.parent / name
        return read_json_object(near if near.is_file() else self.root / name)

    def close(self, name: str, mine: Any) -> Comparison:
        got = torch.from_numpy(np.ascontiguousarray(mine))
        return close(name, got, self.tensors[name], atol=STATE_ACTION_ATOL, rtol=STATE_ACTION_RTOL)


def preprocess_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the run of one ``preprocess_*`` file.

    Raises: CheckpointError when it cannot be read or is of no known kind.
    """
    if path.suffix == ".json":
        data = read_json_object(path)
        return [GoldenRun(path.name, lambda *_: _compare_settings(path, data))]
    case = _read(path, root)
    kinds = [kind for kind, sign in _SIGNS.items() if any(sign.match(n) for n in case.tensors)]
    if len(kinds) != 1:
        raise CheckpointError(
            f"golden case {path.name} must be of one known kind ({', '.join(_SIGNS)}); fits "
            f"{', '.join(kinds) or 'none'} with tensors {', '.join(sorted(case.tensors))}. "
            "Remove it from the set."
        )
    compare = _COMPARE[kinds[0]]
    return [GoldenRun(path.stem, lambda *_: compare(case))]


def _read(path: Path, root: Path) -> Preprocess:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"golden case {path.name} must be a readable safetensors file; got {error}. "
            "Copy the golden set again."
        ) from error
    return Preprocess(path, root, tensors, metadata)


# ---------------------------------------------------------------- images


_IMAGE = re.compile(r"(?P<stem>.+)\.in")
_SHORT = re.compile(r"(newer|release)_short(\d+)_frac(\d+)(_letterbox)?")
_TARGET = re.compile(r"(newer|release)_target(\d+)_crop(\d+)(_letterbox)?")
_TORCHVISION = re.compile(r"torchvision_(newer|release)(?:_target(\d+)_crop(\d+))?(_letterbox)?")
# What the name leaves out, by the fixtures' description.
_TORCHVISION_SIZES = (64, 58)


def _compare_images(case: Preprocess) -> list[Comparison]:
    rows = []
    for name, want in case.tensors.items():
        if _IMAGE.fullmatch(name):
            continue
        stem, _, label = name.rpartition(".")
        recipe = image_recipe(label)
        if recipe is None:
            rows.append(unknown(name))
            continue
        mine = torch.from_numpy(recipe.apply(case.array(f"{stem}.in")))
        if recipe.area:
            rows.append(exact(name, mine, want))
        else:
            rows.append(absolute(name, mine, want, LEVEL_ATOL))
    return rows


def image_recipe(label: str) -> ImageRecipe | None:
    """Return the recipe that a fixture's output name stands for; None for an unknown name.

    ``release`` code padded every image to a square; later code does so when it is told to.
    """
    if match := _SHORT.fullmatch(label):
        version, side, share, padded = match.groups()
        # "frac095" is 0.95: the digits behind the first are decimals.
        fraction = float(f"{share[0]}.{share[1:] or '0'}")
        data: dict[str, Any] = {"shortest_image_edge": int(side), "crop_fraction": fraction}
    elif match := _TARGET.fullmatch(label):
        version, target, crop, padded = match.groups()
        data = {"shortest_image_edge": None, "crop_fraction": None, **_sizes(target, crop)}
    elif match := _TORCHVISION.fullmatch(label):
        version, target, crop, padded = match.groups()
        sizes = (target, crop) if target else _TORCHVISION_SIZES
        data = {"use_albumentations": False, **_sizes(*sizes)}
    else:
        return None
    padded = version == "release" or bool(padded)
    return ImageRecipe.from_settings(
        {"use_albumentations": True, "letter_box_transform": padded, **data}
    )


def _sizes(target: Any, crop: Any) -> dict[str, list[int]]:
    return {"image_target_size": [int(target)] * 2, "image_crop_size": [int(crop)] * 2}


# ---------------------------------------------------------------- states and actions

_STATE_ACTION = re.compile(
    r"(?P<tag>.+)\.pct(?P<pct>[01])\.rel(?P<rel>[01])\."
    r"(?P<what>state_in|state_norm|action_norm_in|action_decoded)\.(?P<key>.+)"
)


def _compare_state_action(case: Preprocess) -> list[Comparison]:
    data = case.beside(f"{case.path.stem}.json")
    done: dict[str, Mapping[str, NDArray[Any]]] = {}
    rows = []
    for name in case.tensors:
        match = _STATE_ACTION.fullmatch(name)
        if match is None:
            rows.append(unknown(name))
            continue
        if match["what"] in ("state_in", "action_norm_in"):
            continue
        prefix = f"{match['tag']}.pct{match['pct']}.rel{match['rel']}"
        what = f"{prefix}.{match['what']}"
        if what not in done:
            robot = _robot(data, match["tag"], match["pct"] == "1", match["rel"] == "1")
            compute = _normalized if match["what"] == "state_norm" else _decoded
            done[what] = compute(case, prefix, robot)
        mine = done[what].get(match["key"])
        rows.append(unknown(name) if mine is None else case.close(name, mine))
    return rows


def _robot(data: Mapping[str, Any], tag: str, percentiles: bool, relative: bool) -> Robot:
    """Return one embodiment of the file, with room for whatever it holds."""
    settings = ProcessorSettings.from_json(
        {
            "modality_configs": data["modality_configs"],
            "use_percentiles": percentiles,
            "use_relative_action": relative,
            "apply_sincos_state_encoding": True,
            "use_albumentations": True,  # no images here; its settings have defaults
        },
        data["statistics"],
        {tag: 0},  # projectors are the pipeline's business
    )
    if tag not in settings.modalities:
        raise CheckpointError(
            f"golden case of states and actions must describe {tag!r}; got "
            f"{', '.join(settings.modalities)}. Copy the golden set again."
        )
    steps = settings.modalities[tag].state.steps
    return Robot.build(tag, settings, _roomy(GrootConfig.released(), steps))


def _roomy(config: GrootConfig, steps: int) -> GrootConfig:
    """Return the config with sizes that no case exceeds: the cases' own are not the model's."""
    return replace(
        config,
        max_state_dim=4096,
        max_action_dim=4096,
        action_horizon=1024,
        max_num_embodiments=1024,
        max_seq_len=1024,
        state_history_length=steps,
    )


def _states(case: Preprocess, prefix: str, robot: Robot) -> list[dict[str, NDArray[Any]]]:
    """Return the raw state of every row."""
    batch = {key: case.array(f"{prefix}.{key}") for key in robot.state}
    rows = len(next(iter(batch.values())))
    return [{key: values[i] for key, values in batch.items()} for i in range(rows)]


def _normalized(case: Preprocess, prefix: str, robot: Robot) -> dict[str, NDArray[Any]]:
    rows = [robot.normalize_state(raw) for raw in _states(case, f"{prefix}.state_in", robot)]
    return {key: np.stack([row[key] for row in rows]) for key in robot.state}


def _decoded(case: Preprocess, prefix: str, robot: Robot) -> dict[str, NDArray[Any]]:
    columns = robot.columns()
    actions = np.concatenate(
        [case.array(f"{prefix}.action_norm_in.{key}") for key in columns], axis=-1
    )
    states = _states(case, f"{prefix}.state_in", robot)
    decoded = np.stack([robot.decode(a, raw) for a, raw in zip(actions, states, strict=True)])
    return {key: decoded[..., place] for key, place in columns.items()}


def _compare_settings(path: Path, data: Mapping[str, Any]) -> list[Comparison]:
    """Compare what is read of modality configs and statistics with what the file says."""
    configs = data.get("modality_configs")
    if not isinstance(configs, Mapping):
        raise CheckpointError(
            f"golden case {path.name} must hold modality_configs and statistics; got "
            f"{', '.join(data)}. Remove it from the set."
        )
    rows = []
    for tag, config in configs.items():
        robot = _robot(data, tag, False, False)
        for section, got in (
            ("state", robot.state_widths),
            ("action", {part.key: part.scaling.dim for part in robot.actions}),
        ):
            stats = data["statistics"][tag][section]
            want = {key: len(stats[key]["min"]) for key in config[section]["modality_keys"]}
            rows.append(
                exact(f"statistics of {tag}: {section}", list(got.items()), list(want.items()))
            )
        steps = len(config["action"]["delta_indices"])
        rows.append(
            exact(f"modality_configs of {tag}: action steps", robot.modalities.action.steps, steps)
        )
    return rows


# ---------------------------------------------------------------- the whole pipeline


def _compare_pipeline(case: Preprocess) -> list[Comparison]:
    tag = case.metadata["embodiment_tag"]
    processor = _pipeline_processor(case, tag)
    robot = processor.robot(tag)
    video, instructions = robot.modalities.video, json.loads(case.metadata["instructions"])
    frames = {key: case.array(f"in.video.{key}") for key in video.keys}
    states = _states(case, "in.state", robot)
    rows = [
        processor.row(
            Observation(
                {key: f[i] if video.steps > 1 else f[i][0] for key, f in frames.items()},
                states[i],
                instruction,
                {"embodiment": tag},
            )
        )
        for i, instruction in enumerate(instructions)
    ]
    results = _collated(processor, rows)
    if (normalized := case.tensors.get("in.normalized_action")) is not None:
        decoded = np.stack(
            [processor.decode(a, row)[0] for a, row in zip(normalized, rows, strict=True)]
        )
        for key, place in robot.columns().items():
            results[f"out.action.{key}"] = torch.from_numpy(decoded[..., place].copy())
    out = [_pipeline_row(case, name, results) for name in case.tensors if name[:3] != "in."]
    texts = [re.sub(rf"({re.escape(IMAGE)})+", IMAGE, text) for text in _texts(processor, rows)]
    if "texts" in case.metadata:
        out.append(exact("texts", texts, json.loads(case.metadata["texts"])))
    return out


def _pipeline_processor(case: Preprocess, tag: str) -> Processor:
    data = case.beside(case.metadata.get("stats", STATISTICS))
    known = {name: _value(text) for name, text in case.metadata.items()}
    settings = ProcessorSettings.from_json(
        {
            "use_albumentations": True,
            **{name: known[name] for name in (*FLAGS, *_RECIPE) if name in known},
            "modality_configs": {tag: data["modality_configs"][tag]},
        },
        data["statistics"],
    )
    config = GrootConfig.from_folder(case.root)
    steps = settings.modalities[tag].state.steps
    config = replace(_roomy(config, steps), **{n: known[n] for n in _SHARED if n in known})
    return Processor(config, settings, BackboneSource(config, case.root), max_text_tokens=8192)


_RECIPE = (
    "use_albumentations",
    "letter_box_transform",
    "shortest_image_edge",
    "crop_fraction",
    "image_crop_size",
    "image_target_size",
)


def _value(text: str) -> Any:
    """Return a metadata value; text that is no JSON stays text, Python's literals are known."""
    try:
        return {"True": True, "False": False, "None": None}.get(text, json.loads(text))
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _collated(processor: Processor, rows: list[GrootRow]) -> dict[str, Tensor]:
    """Return the rows as the official collator does: padded on the left, images side by side."""
    longest = max(len(row.input_ids) for row in rows)
    ids = torch.full((len(rows), longest), processor.config.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row.input_ids) :] = torch.from_numpy(row.input_ids)
        mask[i, longest - len(row.input_ids) :] = 1
    return {
        "out.input_ids": ids,
        "out.attention_mask": mask,
        "out.pixel_values": torch.cat([row.pixel_values for row in rows]),
        "out.image_grid_thw": torch.tensor([grid for row in rows for grid in row.grids]),
        "out.embodiment_id": torch.tensor([row.embodiment_id for row in rows]),
        "out.state": torch.from_numpy(np.stack([row.state for row in rows])),
    }


def _pipeline_row(case: Preprocess, name: str, results: Mapping[str, Tensor]) -> Comparison:
    got, want = results.get(name), case.tensors[name]
    if got is None:
        return unknown(name)
    if not want.is_floating_point():
        return exact(name, got, want)
    if name == "out.pixel_values":
        return absolute(name, got, want, PIXEL_ATOL)
    return close(name, got, want, atol=STATE_ACTION_ATOL, rtol=STATE_ACTION_RTOL)


def _texts(processor: Processor, rows: list[GrootRow]) -> list[str]:
    decode = processor.backbone.load().tokenizer.text
    return [decode(row.input_ids.tolist()) for row in rows]


_SIGNS = {
    "images": re.compile(r"[^.]+\.in$"),
    "states and actions": _STATE_ACTION,
    "pipeline": re.compile(r"in\.video\."),
}
_COMPARE: dict[str, Callable[[Preprocess], list[Comparison]]] = {
    "images": _compare_images,
    "states and actions": _compare_state_action,
    "pipeline": _compare_pipeline,
}
