"""Cosmos3, as a policy and as a generator of videos, as models to pair."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import torch
from benchmarks.peers.cosmos.sizes import (
    LEAST_LAYERS,
    RELEASED_LAYERS,
    CosmosSizes,
    Kind,
)
from benchmarks.peers.model import GoldenCase, Model
from safetensors import safe_open
from safetensors.torch import load_file

STEPS = 4
ATOL = 1e-4
DOMAINS = {"bridge_orig_lerobot": 7, "droid_lerobot": 8}
IDS = ("cond_ids", "uncond_ids")


def golden_cases(path: Path, *, kind: Kind) -> list[GoldenCase]:
    """Return the check of one whole run of the pipeline; none where it shows something else.

    A policy from one frame, or a video or a still from text, by the flow schedule. Other pieces,
    modes and the schedules of other code are named and not run.
    """
    with safe_open(path, framework="pt") as file:
        meta, held = file.metadata(), set(file.keys())
    action = json.loads(meta.get("action", "{}"))
    wanted = "final_action" if kind == "policy" else "final_video"
    whole = {*IDS, "init_video", "step_video", wanted} <= held and meta.get("karras") == "false"
    asked = kind == "policy" if action else kind == "video"
    plain = action.get("mode", "policy") == "policy" and not {"in_video", "in_image"} & held
    if not (whole and asked and plain):
        return []
    tensors = load_file(path)
    guidance, shift = float(meta["guidance_scale"]), float(meta["flow_shift"])
    inputs = {
        "input_ids": tensors["cond_ids"][None],
        "neg_input_ids": tensors["uncond_ids"][None],
        "sampling": torch.tensor([guidance, shift, float(meta.get("fps", 24.0))]),
        "noise": tensors["init_video"],
    }
    result = tensors[wanted]
    if kind == "policy":
        result = result[None]
        inputs |= {
            "image": tensors["in_action_image"][None],
            "video_noise": tensors["init_video"],
            "noise": tensors["init_action"][None, :, : result.shape[2]],
            "domain_id": torch.tensor([DOMAINS[action["domain_name"]]]),
            "tier": torch.tensor([int(action["resolution_tier"])]),
        }
    return [
        GoldenCase(
            inputs={name: tensor.contiguous() for name, tensor in inputs.items()},
            wanted=result,
            dtype="fp32",
            cameras=1,
            tokens=inputs["input_ids"].shape[1],
            steps=int(meta["num_inference_steps"]),
            measure="largest",
            limit=ATOL,
        )
    ]


def _model(name: str, kind: Kind) -> Model:
    return Model(
        name=name,
        of_depth=partial(CosmosSizes.of_depth, kind=kind),
        from_folder=partial(CosmosSizes.from_folder, kind=kind),
        peers={"phyai": "cosmos.ours", "diffusers": "cosmos.hf"},
        golden_cases=partial(golden_cases, kind=kind),
        golden_files="case_*.safetensors",
        released_layers=RELEASED_LAYERS,
        least_layers=LEAST_LAYERS,
        cameras=1,
        tokens=32,
        steps=STEPS,
        pads=False,
    )


COSMOS3_POLICY = _model("cosmos3_policy", "policy")
COSMOS3 = _model("cosmos3", "video")
