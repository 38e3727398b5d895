"""Reads a case file and tells its kind by what is inside."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.golden import GoldenRun
from phyai.json_files import read_json_object

VISION = {"pixel_values", "target_sizes"}
PROMPT = {"input_ids", *VISION}
INPUTS: Mapping[str, frozenset[str]] = {
    "gdn_op": frozenset({"q", "k", "v", "g", "beta", "initial_state"}),
    "text_layers": frozenset({"x", "attn_layer_index", "mrope_positions"}),
    "vision": frozenset(VISION),
    "vlm": frozenset({*PROMPT, "attention_mask", "prefix_len"}),
    "action": frozenset(
        {"vl_embs", "attention_mask", "state", "noise", "embodiment_id", "num_steps"}
    ),
    "e2e": frozenset({*PROMPT, "attention_mask", "state", "noise", "embodiment_id", "num_steps"}),
    "preprocess": frozenset(),
}
"""Kind -> the tensors that are inputs; all others are results."""


@dataclass(frozen=True)
class Case:
    """One case file: its tensors or JSON object, and the folder with config and weights."""

    path: Path
    root: Path
    kind: str
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    data: Mapping[str, Any]

    @property
    def inputs(self) -> frozenset[str]:
        return INPUTS[self.kind]

    def outputs(self) -> dict[str, Tensor]:
        """Return every tensor that is not an input."""
        return {name: t for name, t in self.tensors.items() if name not in self.inputs}


def read_case(path: Path, root: Path) -> Case:
    """Return a case; CheckpointError when it cannot be read or is of no known kind, or of two."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    data: Mapping[str, Any] = {}
    if path.suffix == ".json":
        data = read_json_object(path)
        kinds = [kind for kind, fits in _JSON_KINDS.items() if fits(data)]
        held = sorted(data)
    else:
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"golden case {path.name} must be a readable safetensors file; got {error}. "
                "Copy the golden set again."
            ) from error
        kinds = [kind for kind, fits in _KINDS.items() if fits(set(tensors))]
        held = sorted(tensors)
    if len(kinds) != 1:
        raise CheckpointError(
            f"golden case {path.name} must be of one known kind ({', '.join(INPUTS)}, layout); "
            f"fits {', '.join(kinds) or 'none'} with {', '.join(held)}. Remove it from the set."
        )
    return Case(path, root, kinds[0], tensors, metadata, data)


def runs_of(case: Case) -> list[GoldenRun]:
    """Return the runs of a case."""
    if case.kind in ("preprocess", "preprocess_facts"):
        from phyai.models.minicpm_robot.golden.preprocess import preprocess_runs

        return preprocess_runs(case)
    if case.kind == "layout":
        from phyai.models.minicpm_robot.golden.layouts import layout_runs

        return layout_runs(case)
    if case.kind in ("gdn_op", "text_layers"):
        from phyai.models.minicpm_robot.golden.layers import layer_runs

        return layer_runs(case)
    from phyai.models.minicpm_robot.golden.runs import model_runs

    return model_runs(case)


_PREPROCESS = re.compile(r"\d+\.\w+")

_KINDS: Mapping[str, Callable[[set[str]], bool]] = {
    "gdn_op": lambda names: {"q", "k", "v", "g", "beta"} <= names,
    "text_layers": lambda names: {"x", "attn_layer_index"} <= names,
    "vision": lambda names: names >= VISION and "input_ids" not in names,
    "vlm": lambda names: names >= PROMPT and "actions" not in names,
    "action": lambda names: {"vl_embs", "noise", "actions"} <= names and "input_ids" not in names,
    "e2e": lambda names: {*PROMPT, "noise", "actions"} <= names,
    "preprocess": lambda names: bool(names) and all(map(_PREPROCESS.fullmatch, names)),
}
_JSON_KINDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "preprocess_facts": lambda data: isinstance(data.get("images"), list),
    "layout": lambda data: isinstance(data.get("cases"), list),
}
