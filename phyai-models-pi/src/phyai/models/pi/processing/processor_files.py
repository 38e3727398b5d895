"""Reads LeRobot's policy_preprocessor.json and policy_postprocessor.json as data.

Only known steps are accepted and nothing named in a file is executed: a step is a description
of what to do, and this runtime does it in its own code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError, did_you_mean
from phyai.json_files import read_json_object
from phyai.models.pi.config import LIMITS
from phyai.models.pi.config_files import Fields
from phyai.models.pi.processing.norm_stats import Stats, load_stats
from phyai.models.pi.processing.tokenizer import DEFAULT_TOKENIZER

PREPROCESSOR_FILE = "policy_preprocessor.json"
POSTPROCESSOR_FILE = "policy_postprocessor.json"
STATE_PROMPT_STEP = "pi05_prepare_state_tokenizer_processor_step"

KNOWN_STEPS = (
    "absolute_actions_processor",
    "device_processor",
    "normalizer_processor",
    "pi0_new_line_processor",
    STATE_PROMPT_STEP,
    "relative_actions_processor",
    "rename_observations_processor",
    "to_batch_processor",
    "tokenizer_processor",
    "unnormalizer_processor",
)


@dataclass(frozen=True)
class NormStep:
    """One (un)normaliser step: feature -> type, type -> mode, and statistics if it has a file."""

    features: Mapping[str, str] = field(default_factory=dict)
    norm_map: Mapping[str, str] = field(default_factory=dict)
    eps: float = 1e-8
    stats: Stats | None = None

    def mode(self, feature: str) -> str:
        """Return how ``feature`` is normalised; IDENTITY when the step does not list it."""
        kind = self.features.get(feature)
        return "IDENTITY" if kind is None else self.norm_map.get(kind, "IDENTITY")


@dataclass(frozen=True)
class ProcessorFiles:
    """What the two processor files of a checkpoint say."""

    rename_map: Mapping[str, str] = field(default_factory=dict)
    tokenizer_name: str = DEFAULT_TOKENIZER
    max_length: int | None = None
    state_in_prompt: bool = False
    relative: bool = False
    exclude_joints: tuple[str, ...] = ()
    action_names: tuple[str, ...] | None = None
    normalizer: NormStep = field(default_factory=NormStep)
    unnormalizer: NormStep = field(default_factory=NormStep)


@dataclass(frozen=True)
class _RawStep:
    name: str
    fields: Fields
    state_file: str | None


def _steps(path: Path) -> list[_RawStep]:
    data = read_json_object(path)
    raw = data.get("steps")
    if not isinstance(raw, list):
        raise CheckpointError(
            f"{path.name}: field 'steps' must be a list; got {raw!r}. Use a complete checkpoint."
        )
    steps = []
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise CheckpointError(
                f"{path.name}: step {index} must be an object; got {item!r}. Correct the file."
            )
        name = item.get("registry_name", item.get("class"))
        if name not in KNOWN_STEPS:
            hint = did_you_mean(name, KNOWN_STEPS) if isinstance(name, str) else ""
            raise CheckpointError(
                f"{path.name}: step {index} must be one of {', '.join(KNOWN_STEPS)}; got "
                f"{name!r}.{hint} This processing step is not supported."
            )
        where = f"{path.name} step {name!r}"
        config = Fields(item, where).mapping("config") or {}
        state_file = item.get("state_file")
        if state_file is not None and not isinstance(state_file, str):
            raise CheckpointError(
                f"{where}: field 'state_file' must be a string; got {state_file!r}. "
                "Correct the file."
            )
        steps.append(_RawStep(str(name), Fields(config, where), state_file))
    return steps


def _norm_step(folder: Path, step: _RawStep) -> NormStep:
    features: dict[str, str] = {}
    for name, feature in (step.fields.mapping("features") or {}).items():
        kind = feature.get("type") if isinstance(feature, dict) else None
        if not isinstance(kind, str):
            raise CheckpointError(
                f"{step.fields.where}: feature {name!r} must have a 'type'; got {feature!r}. "
                "Correct the file."
            )
        features[name] = kind
    table = Fields(step.fields.mapping("norm_map") or {}, f"{step.fields.where} norm_map")
    stats = None
    if step.state_file is not None:
        if Path(step.state_file).name != step.state_file:
            raise CheckpointError(
                f"{step.fields.where}: field 'state_file' must be a plain file name beside the "
                f"json; got {step.state_file!r}. Correct the file."
            )
        stats = load_stats(folder / step.state_file)
    return NormStep(
        features=features,
        norm_map={kind: table.string(kind, "IDENTITY") for kind in table.data},
        eps=step.fields.number("eps", 1e-8),
        stats=stats,
    )


def _max_length(fields: Fields) -> int | None:
    """Return the token budget of the tokenizer step; None leaves it to the config."""
    if fields.data.get("max_length") is None:
        return None
    length, most = fields.integer("max_length", 0), LIMITS["tokenizer_max_length"]
    if not 0 < length <= most:
        raise CheckpointError(
            f"{fields.where}: field 'max_length' must be between 1 and {most}; got {length}. "
            "Correct the file."
        )
    return length


def read_processor_files(folder: Path) -> ProcessorFiles | None:
    """Return what the processor files in ``folder`` say; None when there are none.

    Raises: CheckpointError naming an unknown step, a wrong field or the file that is missing.
    """
    present = [name for name in (PREPROCESSOR_FILE, POSTPROCESSOR_FILE) if (folder / name).exists()]
    if not present:
        return None
    if len(present) == 1:
        absent = POSTPROCESSOR_FILE if present == [PREPROCESSOR_FILE] else PREPROCESSOR_FILE
        raise CheckpointError(
            f"checkpoint must hold both processor files; {absent} is missing in "
            f"{str(folder)!r}. Download it."
        )
    found: dict[str, Any] = {}
    for step in (*_steps(folder / PREPROCESSOR_FILE), *_steps(folder / POSTPROCESSOR_FILE)):
        fields = step.fields
        if step.name == "rename_observations_processor":
            table = Fields(fields.mapping("rename_map") or {}, f"{fields.where} rename_map")
            found["rename_map"] = {name: table.string(name, "") for name in table.data}
        elif step.name == "tokenizer_processor":
            found["max_length"] = _max_length(fields)
            name = fields.data.get("tokenizer_name")
            found["tokenizer_name"] = (
                DEFAULT_TOKENIZER if name is None else fields.string("tokenizer_name", "")
            )
        elif step.name == STATE_PROMPT_STEP:
            found["state_in_prompt"] = True
        elif step.name == "relative_actions_processor":
            found["exclude_joints"] = fields.strings("exclude_joints", ()) or ()
            found["action_names"] = fields.strings("action_names", None)
        elif step.name == "absolute_actions_processor":
            found["relative"] = fields.flag("enabled", False)
        elif step.name == "normalizer_processor":
            found["normalizer"] = _norm_step(folder, step)
        elif step.name == "unnormalizer_processor":
            found["unnormalizer"] = _norm_step(folder, step)
    return ProcessorFiles(**found)
