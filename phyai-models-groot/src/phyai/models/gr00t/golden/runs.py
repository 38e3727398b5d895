"""Model cases: one run per padding behaviour, and one in bfloat16.

With padding off every row equals its result alone (``out.action_pred_solo_rows``); official padding
reproduces the batch as the official code computes it. Tolerances: fp32 as published with the
fixtures; bf16 by the distance allowed between official bf16 and fp32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional

from phyai.adapter import Adapter
from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, Records, absolute, close, exact, unknown
from phyai.models.gr00t.args import GrootArgs
from phyai.models.gr00t.golden.inputs import input_runs
from phyai.models.gr00t.golden.observed import Observed
from phyai.models.gr00t.request import GrootRequest

BACKBONE = 5e-5
HEAD = 1e-5
HEAD_RTOL = 1e-6
"""Activations of the head reach 11, where float32 values are 1e-6 apart; actions get none of it."""
BF16_COSINE = 1e-3
BF16_WORST = 0.08
MAX_ROWS = 16
REQUIRED = ("in.pixel_values", "in.image_grid_thw", "in.input_ids", "in.attention_mask",
            "in.state", "in.embodiment_id", "in.noise", "out.action_pred")  # fmt: skip
ACTIONS, SOLO = "out.action_pred", "out.action_pred_solo_rows"


@dataclass(frozen=True)
class Case:
    """A model case: its tensors and metadata, and the folder with config and weights."""

    path: Path
    root: Path
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    @property
    def mask(self) -> Tensor:
        """Which places of the padded layout hold tokens, bool [B, S]."""
        return self.tensors["in.attention_mask"] == 1

    @property
    def rows(self) -> int:
        return int(self.mask.shape[0])

    @property
    def padded(self) -> bool:
        """Whether some row is shorter than the layout."""
        return not bool(self.mask.all())

    def outputs(self) -> dict[str, Tensor]:
        """Return every tensor that is not an input."""
        return {name: t for name, t in self.tensors.items() if not name.startswith("in.")}


def read_case(path: Path, root: Path) -> Case:
    """Return a model case; CheckpointError when it cannot be read or lacks an input."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"golden case {path.name} must be a readable safetensors file; got {error}. "
            "Copy the golden set again."
        ) from error
    absent = [name for name in REQUIRED if name not in tensors]
    if absent or "num_inference_timesteps" not in metadata:
        raise CheckpointError(
            f"golden case {path.name} must hold a GR00T model case; got no "
            f"{', '.join(absent) or 'num_inference_timesteps'}. Remove it from the set."
        )
    return Case(path, root, tensors, metadata)


def case_runs(case: Case) -> list[GoldenRun]:
    """Return the runs of a case: its inputs, alone, with official padding where needed, in bf16.

    A case that holds nothing of its rows alone has no run of them.
    """
    runs = []
    if any(_belongs(case, name, padding=False) for name in case.outputs()):
        runs.append(_run(case, "", padding=False))
    if case.padded:
        runs.append(_run(case, "[official padding]", padding=True))
    return [*input_runs(case), *runs, _bf16_run(case)]


def case_request(case: Case) -> GrootRequest:
    """Return the request of a case."""
    tensors = case.tensors
    return GrootRequest(
        pixel_values=tensors["in.pixel_values"],
        image_grid_thw=tensors["in.image_grid_thw"],
        input_ids=tensors["in.input_ids"],
        attention_mask=tensors["in.attention_mask"],
        state=tensors["in.state"],
        embodiment_id=tensors["in.embodiment_id"],
        noise=tensors["in.noise"],
        num_steps=int(case.metadata["num_inference_timesteps"]),
        prev_actions=tensors.get("in.rtc_prev_action"),
        rtc_options=json.loads(case.metadata.get("rtc_options", "null")),
    )


def case_args(case: Case, precision: str, *, padding: bool) -> GrootArgs:
    """Return the adapter arguments that load the set's checkpoint and fit the case's batch."""
    return GrootArgs(
        checkpoint_dir=str(case.root),
        max_batch_size=max(MAX_ROWS, case.rows),
        precision=precision,
        official_padding=padding,
    )


def _run(case: Case, label: str, *, padding: bool) -> GoldenRun:
    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        seen = Observed(records, result, case.mask, padded=padding)
        names = [n for n in case.outputs() if _belongs(case, n, padding=padding)]
        return [_compare(case, name, seen) for name in names]

    args = case_args(case, "fp32", padding=padding)
    return GoldenRun(f"{case.path.stem}{label}", compare, args, case_request(case))


def _bf16_run(case: Case) -> GoldenRun:
    name = SOLO if SOLO in case.tensors else ACTIONS
    want = case.tensors[name]

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        got = result.float().cpu()
        cosine = functional.cosine_similarity(got.flatten(1), want.flatten(1)).min()
        return [
            absolute(f"{name} [bf16, max]", got, want, BF16_WORST),
            Comparison(f"{name} [bf16, 1 - cosine]", 1.0 - float(cosine), BF16_COSINE),
        ]

    args = case_args(case, "bf16", padding=case.padded and name == ACTIONS)
    return GoldenRun(f"{case.path.stem}[bf16]", compare, args, case_request(case), records=())


def _belongs(case: Case, name: str, *, padding: bool) -> bool:
    """Return whether a fixture tensor is compared in the run with or without official padding.

    Without it, tensors behind the VL self-attention are those of the row alone; where rows are
    padded the fixture has only their actions.
    """
    if not case.padded:
        return True
    if name in (ACTIONS, SOLO):
        return padding is (name == ACTIONS)
    return padding or not _depends_on_padding(name)


def _compare(case: Case, name: str, seen: Observed) -> Comparison:
    """Return the comparison of one fixture tensor."""
    want = case.tensors[name]
    if name in (ACTIONS, SOLO):
        return absolute(name, seen.actions, want, HEAD)
    if name in _EXACT:
        return _EXACT[name](name, seen, want)
    try:
        got, wanted = seen.pair(name, want)
    except KeyError:
        return unknown(name)
    if not want.is_floating_point():
        return exact(name, got, wanted)
    if name.startswith(("vision.", "text.", "backbone.")):
        return absolute(name, got, wanted, BACKBONE)
    return close(name, got, wanted, atol=HEAD, rtol=HEAD_RTOL)


def _depends_on_padding(name: str) -> bool:
    first = {"step_0.actions_in", "step_0.action_features", "step_0.sa_embs"}
    every = (".temb", ".timestep")
    if name.startswith("step_"):
        return name not in first and not name.endswith(every)
    return name.startswith(("head.vlsa_block_", "out."))


def _image_mask(name: str, seen: Observed, want: Tensor) -> Comparison:
    got = torch.zeros_like(want)
    got[seen.mask] = seen.one("head.image")
    return exact(name, got, want)


def _attention_mask(name: str, seen: Observed, want: Tensor) -> Comparison:
    """Compare lengths: the runtime keeps no mask, only how many tokens each row has."""
    return exact(name, seen.one("prefix.lens"), want.sum(dim=1))


_EXACT: dict[str, Callable[[str, Observed, Tensor], Comparison]] = {
    "head.image_mask": _image_mask,
    "head.attention_mask": _attention_mask,
}
