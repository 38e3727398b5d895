"""Golden cases of the toy policy: inputs, noise and the actions that belong to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from correct_policy.model import ToyArgs
from safetensors.torch import load_file

from phyai.golden import Comparison, GoldenRun, absolute
from phyai.types import Observation


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    if path.suffix != ".safetensors":
        return []
    case = load_file(path)
    request = Observation(
        images={"front": case["in.image"].numpy()},
        state=case["in.state"].numpy(),
        options={"noise": case["in.noise"].numpy()},
    )

    def compare(adapter: Any, result: Any, records: Any) -> list[Comparison]:
        return [absolute("actions", torch.from_numpy(result.actions), case["actions"], 1e-5)]

    args = ToyArgs(checkpoint_dir=str(root))
    return [GoldenRun(path.stem, compare, args, request, records=())]
