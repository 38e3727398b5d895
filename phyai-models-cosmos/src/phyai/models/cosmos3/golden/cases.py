"""A golden case: its tensors and facts, its kind, and the checkpoint it belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.models.cosmos3.args import Cosmos3Args, Cosmos3PolicyArgs
from phyai.models.cosmos3.checkpoint_files import INDEX

# Tolerances published with the fixtures: float32 on a CPU, largest absolute error.
ROPE = 1e-5
TEXT_KV = 1e-5
FORWARD = 2e-5
SIGMAS = 1e-6
TRAJECTORY = 1e-5
LOOP = 1e-4
VAE = 1e-4
SOUND = 2e-5
"""Of the largest value of the unclamped waveform."""
SOUND_CLAMPED = 2e-3
SOUND_OF_LOOP = 4e-3  # what a loop may be off by, times the decoder's gain: over 100

# Kind -> tensors that only cases of this kind have together.
KINDS: dict[str, frozenset[str]] = {
    "evaluation": frozenset({"input_ids", "video", "timestep", "velocity_video"}),
    "denoise": frozenset({"cond_ids", "x0_video", "step.cond_v"}),
    "pipeline": frozenset({"cond_ids", "init_video", "step_video"}),
    "droid_request": frozenset({"canvas0", "cond_ids", "server_action", "x0_latent_first"}),
    "droid_preprocess": frozenset({"action_model", "image_size", "domain_id"}),
    "sampler": frozenset({"x_init"}),
    "vae": frozenset({"pixels", "enc_moments", "latent_raw"}),
    "sound": frozenset({"latent", "waveform"}),
    "rope": frozenset({"position_ids", "cos", "sin", "time.t"}),
}
POLICY_KINDS = ("denoise", "droid_request", "droid_preprocess")


@dataclass(frozen=True)
class Case:
    """A case file; ``facts``: its metadata, decoded; ``written``: as it stands in the file."""

    path: Path
    root: Path
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]
    written: Mapping[str, str]

    @cached_property
    def kind(self) -> str:
        """The one kind it is of.  Raises: CheckpointError for none or several."""
        found = [kind for kind, names in KINDS.items() if names <= set(self.tensors)]
        if len(found) != 1:
            raise CheckpointError(
                f"golden case {self.path.name} must be of one known kind; got {found or 'none'}. "
                "Remove it from the set."
            )
        return found[0]

    @property
    def of_policy(self) -> bool:
        """Whether it belongs to plugin ``cosmos3_policy``."""
        with_actions = "action" in self.tensors or "action" in self.facts
        return self.kind in POLICY_KINDS or (
            self.kind in ("evaluation", "pipeline") and with_actions
        )

    @property
    def stem(self) -> str:
        return self.path.stem

    def fact(self, name: str) -> Any:
        """Return a metadata value.  Raises: CheckpointError when it is absent."""
        if name not in self.facts:
            raise CheckpointError(
                f"golden case {self.path.name} must have metadata {name!r}; got "
                f"{', '.join(sorted(self.facts))}. Copy the golden set again."
            )
        return self.facts[name]

    def text(self, name: str) -> str:
        """Return a metadata text, also one that reads like JSON, such as a prompt ``12``.

        Raises: CheckpointError when it is absent.
        """
        value = self.fact(name)
        return value if isinstance(value, str) else self.written[name]

    @property
    def history(self) -> int:
        """Clean action rows before the actions of a policy case, the present state among them."""
        if "history_length" in self.facts:
            return int(self.facts["history_length"])
        rows = self.facts.get("action_condition_rows")
        return int(self.facts.get("use_state", True)) if rows is None else len(rows)

    def generation_args(self, **changes: Any) -> Cosmos3Args:
        values = {"checkpoint_dir": str(self.root), "precision": "fp32", "record_all": True}
        return Cosmos3Args(**{**values, **changes})

    def policy_args(self, **changes: Any) -> Cosmos3PolicyArgs:
        values = {"checkpoint_dir": str(self.root), "precision": "fp32", "record_all": True}
        return Cosmos3PolicyArgs(**{**values, **changes})


def read_case(path: Path, root: Path) -> Case:
    """Return a case; CheckpointError when it cannot be read or is not of this model."""
    if not path.name.startswith("case_") or path.suffix != ".safetensors":
        raise CheckpointError(
            f"golden case {path.name} must be named case_* and hold tensors; got "
            f"{path.suffix!r}. Remove it from the set."
        )
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"golden case {path.name} must be a readable safetensors file; got {error}. "
            "Copy the golden set again."
        ) from error
    facts = {name: _value(text) for name, text in metadata.items()}
    case = Case(path, _checkpoint(path, root), tensors, facts, metadata)
    assert case.kind  # raises here, where the file is named
    return case


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _checkpoint(path: Path, root: Path) -> Path:
    """Return the nearest folder above a case that holds a checkpoint, within ``root``."""
    for folder in path.parents:
        if (folder / INDEX).is_file():
            return folder
        if folder == root:
            break
    return root
