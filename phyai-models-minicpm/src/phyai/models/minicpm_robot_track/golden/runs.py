"""The two kinds of track cases: the policy from features to waypoints, and the pooling."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.adapter import Adapter
from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, Records, absolute, unknown
from phyai.models.minicpm_robot_track.args import MiniCPMRobotTrackArgs
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.request import MiniCPMRobotTrackRequest
from phyai.models.minicpm_robot_track.vision import pool_features

POLICY = 2e-5
POOLING = 1e-6
MAX_ROWS = 16
CONFIG, MODEL = "track_config.json", "track_model.safetensors"
POLICY_INPUTS = ("input_ids", "coarse_tokens", "fine_tokens", "coarse_time_indices",
                 "fine_time_indices")  # fmt: skip
OPTIONAL_INPUTS = ("attention_mask",)
COARSE_TOKENS, FINE_TOKENS = 4, 64
POOLING_INPUTS = ("dino_tokens", "siglip_tokens")
_ACTIVATION = re.compile(r"act\.(?P<record>trajectory_head|backbone\.(?:layers\.\d+|norm))")
_RECORDED = ("rope_cos", "rope_inv_freq", "rope_sin", "sequence", "control_state", "trajectory")
_PACKED = ("backbone.", "rope_cos", "rope_sin", "sequence")
"""Records of one entry per token, row behind row."""


def case_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the run of a case.  Raises: CheckpointError for an unknown kind."""
    tensors = _read(path)
    if all(name in tensors for name in POLICY_INPUTS):
        return [_policy_run(path, root, tensors)]
    if all(name in tensors for name in POOLING_INPUTS):
        return [GoldenRun(path.stem, lambda *_: _compare_pooling(tensors))]
    raise CheckpointError(
        f"golden case {path.name} must hold a policy case ({', '.join(POLICY_INPUTS)}) or a "
        f"pooling case ({', '.join(POOLING_INPUTS)}); got {', '.join(sorted(tensors))}. Remove it "
        "from the set."
    )


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"golden case {path.name} must be a readable safetensors file; got {error}. Copy the "
            "golden set again."
        ) from error


# ---------------------------------------------------------------- the policy


def _policy_run(path: Path, root: Path, tensors: Mapping[str, Tensor]) -> GoldenRun:
    folder = path.parent if (path.parent / CONFIG).is_file() else root
    config = MiniCPMRobotTrackConfig.from_file(folder / CONFIG)
    request = MiniCPMRobotTrackRequest(
        **{name: tensors[name] for name in POLICY_INPUTS},
        attention_mask=tensors.get("attention_mask"),
    )
    rows, text = request.input_ids.shape
    args = MiniCPMRobotTrackArgs(
        checkpoint_dir=str(folder / MODEL),
        config=config,
        max_batch_size=max(MAX_ROWS, rows),
        max_text_tokens=max(config.max_text_tokens, text),
        precision="fp32",
    )
    inputs = {*POLICY_INPUTS, *OPTIONAL_INPUTS}
    mask = _valid(tensors, config)

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        found = []
        for name, want in tensors.items():
            if name not in inputs:
                found.append(_compare(name, want, result, records, mask))
        return found

    return GoldenRun(path.stem, compare, args, request)


def _valid(tensors: Mapping[str, Tensor], config: MiniCPMRobotTrackConfig) -> Tensor:
    """Return which places of the official layout hold tokens, bool [B, S]."""
    text = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"])) == 1
    window = torch.ones(len(text), config.window_tokens, dtype=torch.bool)
    return torch.cat([text, window], dim=1)


def _compare(name: str, want: Tensor, result: Any, records: Records, mask: Tensor) -> Comparison:
    if name == "trajectory":
        return absolute(name, result.float().cpu(), want, POLICY)
    record = name
    if match := _ACTIVATION.fullmatch(name):
        record = match["record"]
    elif name not in _RECORDED:
        return unknown(name)
    if record not in records:
        return unknown(name)
    got = records[record][0]
    if not record.startswith(_PACKED):
        return absolute(name, got, want, POLICY)
    if want.ndim == 3 and want.shape[:2] != mask.shape:
        want = want.expand(len(mask), -1, -1)  # rotations are equal for all rows
    if want.ndim != 3 or want.shape[:2] != mask.shape:
        return absolute(name, got, want, POLICY)  # says which shapes differ
    return absolute(name, got, want[mask], POLICY)


# ---------------------------------------------------------------- pooling


def _compare_pooling(tensors: Mapping[str, Tensor]) -> list[Comparison]:
    made: dict[str, Tensor] = {}
    dino, siglip = (tensors[name] for name in POOLING_INPUTS)
    made["coarse"], made["fine"] = pool_features(
        dino,
        siglip,
        coarse_tokens=_tokens(tensors, "coarse", COARSE_TOKENS),
        fine_tokens=_tokens(tensors, "fine", FINE_TOKENS),
        record=_keeper(made),
    )
    return [
        absolute(name, made[name], want, POOLING) if name in made else unknown(name)
        for name, want in tensors.items()
        if name not in POOLING_INPUTS
    ]


def _tokens(tensors: Mapping[str, Tensor], name: str, default: int) -> int:
    return tensors[name].shape[1] if name in tensors else default


def _keeper(into: dict[str, Tensor]) -> Callable[[str, Tensor], None]:
    def keep(name: str, value: Tensor) -> None:
        into[name] = value

    return keep
