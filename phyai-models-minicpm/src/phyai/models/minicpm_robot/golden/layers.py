"""Cases of single parts of the decoder: the gated delta rule, one layer of each kind."""

from __future__ import annotations

from typing import Any

import torch

from phyai.adapter import Adapter
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.layers import Placement
from phyai.models.minicpm_robot.args import MiniCPMRobotArgs
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.golden.cases import Case
from phyai.models.minicpm_robot.network.text_cases import delta_case, layers_case
from phyai.models.minicpm_robot.request import MiniCPMRobotRequest

TOLERANCE = 2e-5
ROTARY = ("cos", "sin")


def layer_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a gdn_op or text_layers case, on the kernels and weights of an engine."""

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        found = _computed(case, adapter)
        rows = []
        for name, want in case.outputs().items():
            got = found.get(name)
            if got is not None and name in ROTARY and len(want) == 1:
                got = got[:1]  # all rows turn alike; a case may hold them once
            if got is None:
                rows.append(unknown(name))
            elif want.is_floating_point():
                rows.append(absolute(name, got.cpu(), want, TOLERANCE))
            else:
                rows.append(exact(name, got.cpu(), want))
        return rows

    args = MiniCPMRobotArgs(checkpoint_dir=str(case.root), precision="fp32")
    return [GoldenRun(case.path.stem, compare, args, _any_request(case), records=())]


def _computed(case: Case, adapter: Any) -> dict[str, torch.Tensor]:
    services = adapter.services
    given = {name: t.to(services.device) for name, t in case.tensors.items()}
    with torch.no_grad():
        if case.kind == "gdn_op":
            at = Placement(services.kernels, services.device, torch.float32)
            return delta_case(at, given)
        return layers_case(adapter.prefix.text, given)


def _any_request(case: Case) -> MiniCPMRobotRequest:
    """Return a request of the head alone: what opens the engine costs as little as can be."""
    head = MiniCPMRobotConfig.from_folder(case.root).head
    return MiniCPMRobotRequest(
        vl_embs=torch.zeros(1, 1, head.cross_attention_dim),
        noise=torch.zeros(1, head.action_horizon, head.action_dim),
        num_steps=1,
    )
