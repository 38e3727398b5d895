"""Model cases: inputs through the engine, every tensor on the way and the actions compared.

One run in float32, where there are actions another one in bfloat16. Tolerances: fp32 as published
with the fixtures; bf16 by the cosine of the actions, see ``bf16``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import Adapter
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.models.minicpm_robot.args import MiniCPMRobotArgs
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.golden.bf16 import ACTIONS, bf16_run
from phyai.models.minicpm_robot.golden.cases import Case
from phyai.models.minicpm_robot.golden.observed import Observed
from phyai.models.minicpm_robot.golden.shared_head import shared_root
from phyai.models.minicpm_robot.request import MiniCPMRobotRequest

TOLERANCE = {"vision": 2e-5, "action": 2e-5, "vlm": 2e-4, "e2e": 2e-4}
MAX_ROWS = 16


def model_runs(case: Case) -> list[GoldenRun]:
    """Return the runs of a vision, vlm, action or e2e case.  Raises: CheckpointError."""
    root = case_root(case)
    request = case_request(case, root)

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        seen = Observed(case, records, result, adapter)
        return [_compare(case, name, seen) for name in case.outputs()]

    runs = [GoldenRun(case.path.stem, compare, case_args(case, root, "fp32"), request)]
    if ACTIONS in case.tensors:
        runs.append(bf16_run(case, case_args(case, root, "bf16"), request))
    return runs


def case_root(case: Case) -> Path:
    """Return the folder whose checkpoint a case belongs to.

    A head case without embodiment ids is one of the shared head: of the set's own checkpoint when
    that has such a head, else of the copy of it with the head's tensors replaced.
    """
    alone = case.kind == "action" and "embodiment_id" not in case.tensors
    return shared_root(case.root) if alone else case.root


def case_args(case: Case, root: Path, precision: str) -> MiniCPMRobotArgs:
    """Return the adapter arguments that load the checkpoint and fit the case's batch."""
    rows = max(
        (len(t) for n, t in case.tensors.items() if n in ("input_ids", "vl_embs")), default=1
    )
    # A case of the head alone has nothing else that bf16 could change.
    head = "bf16" if precision == "bf16" and case.kind == "action" else "fp32"
    return MiniCPMRobotArgs(
        checkpoint_dir=str(root),
        max_batch_size=max(MAX_ROWS, rows),
        precision=precision,
        action_params_dtype=head,
        max_text_tokens=8192,
    )


def case_request(case: Case, root: Path) -> MiniCPMRobotRequest:
    """Return the request of a case; what a case has no say in costs as little as can be."""
    given: dict[str, Any] = dict(case.tensors)
    inputs = ("vl_embs", "input_ids", "pixel_values", "target_sizes", "attention_mask", "state",
              "noise", "embodiment_id")  # fmt: skip
    known = {name: given[name] for name in inputs if name in given}
    config = MiniCPMRobotConfig.from_folder(root)
    if case.kind == "vision":
        known["input_ids"] = _placeholders(config, given["target_sizes"])
    if case.kind in ("vision", "vlm"):
        head, rows = config.head, len(known["input_ids"])
        known["noise"] = torch.zeros(rows, head.action_horizon, head.action_dim)
        return MiniCPMRobotRequest(**known, num_steps=1)
    return MiniCPMRobotRequest(**known, num_steps=_steps(case))


def _placeholders(config: MiniCPMRobotConfig, sizes: Tensor) -> Tensor:
    """Return ids [1, S] of a text token and the image tokens of images."""
    count = sum(config.image_tokens(int(h), int(w)) for h, w in sizes)
    text = 0 if config.image_token_id else 1
    return torch.tensor([[text, *[config.image_token_id] * count]])


def _steps(case: Case) -> int | None:
    """Return the solver steps of a case: said, or told by the time of its second step."""
    said = case.metadata.get("num_steps") or case.metadata.get("num_inference_timesteps")
    if said is not None:
        return int(said)
    if "num_steps" in case.tensors:
        return int(case.tensors["num_steps"])
    second = case.tensors.get("act.step1.t")
    return None if second is None else round(1 / (1 - float(second)))


def _compare(case: Case, name: str, seen: Observed) -> Comparison:
    """Return the comparison of one fixture tensor."""
    want = case.tensors[name]
    try:
        got, wanted = seen.pair(name, want)
    except KeyError:
        return unknown(name)
    if not want.is_floating_point():
        return exact(name, got, wanted)
    return absolute(name, got, wanted, TOLERANCE[case.kind])
