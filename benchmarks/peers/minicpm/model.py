"""MiniCPM-RobotManip as a model to pair."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.minicpm.sizes import LEAST_LAYERS, RELEASED_LAYERS, MiniCPMSizes
from benchmarks.peers.model import GoldenCase, Model
from safetensors.torch import load_file

STEPS = 4
ATOL_HEAD, ATOL_VLM = 2e-5, 2e-4
HEAD = ("state", "embodiment_id", "noise")
WHOLE = ("input_ids", "pixel_values", "target_sizes")


def golden_cases(path: Path) -> list[GoldenCase]:
    """Return the checks of one case: features to actions, a whole request, or ids to features.

    None for a piece of the network, and for a head with one bank. All in float32: rounding these
    weights to bfloat16 alone moves the actions by 0.07 relative norm, which no wiring can help.
    """
    held = load_file(path).keys()
    if {"vl_embs", "actions", *HEAD} <= held:
        return [_case(path, ("vl_embs", *HEAD), "actions", ATOL_HEAD)]
    if {"actions", *WHOLE, *HEAD} <= held:
        return [_case(path, (*WHOLE, *HEAD), "actions", ATOL_VLM)]
    if {"last_hidden_state", *WHOLE} <= held:
        return [_case(path, WHOLE, "last_hidden_state", ATOL_VLM)]
    return []


def _case(path: Path, names: tuple[str, ...], wanted: str, limit: float) -> GoldenCase:
    tensors, sizes = load_file(path), MiniCPMSizes.from_folder(path.parent)
    sequence = tensors["vl_embs" if "vl_embs" in names else "input_ids"]
    images = tensors["target_sizes"] if "target_sizes" in names else ()
    return GoldenCase(
        inputs={name: tensors[name].contiguous() for name in names},
        wanted=tensors[wanted],
        dtype="fp32",
        cameras=max(1, len(images)),
        tokens=sequence.shape[1],
        steps=sizes.head.get("num_inference_timesteps", STEPS),
        measure="largest",
        limit=limit,
    )


MINICPM_ROBOT = Model(
    name="minicpm_robot",
    of_depth=MiniCPMSizes.of_depth,
    from_folder=MiniCPMSizes.from_folder,
    peers={"phyai": "minicpm.ours", "hf": "minicpm.hf", "hf-sdpa": "minicpm.hf"},
    environments={"hf": "hf-minicpm"},
    golden_cases=golden_cases,
    golden_files="case_*.safetensors",
    released_layers=RELEASED_LAYERS,
    least_layers=LEAST_LAYERS,
    cameras=3,
    tokens=64,
    steps=STEPS,
    pads=False,
)
