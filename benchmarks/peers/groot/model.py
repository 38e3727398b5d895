"""GR00T N1.7 as a model to pair."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.peers.groot.sizes import LEAST_LAYERS, RELEASED_LAYERS, GrootSizes
from benchmarks.peers.model import GoldenCase, Model
from safetensors import safe_open
from safetensors.torch import load_file

ATOL_FP32 = 1e-5
ATOL_BF16 = 0.08
"""The official code in bfloat16 is up to 0.027 from these actions, made in float32."""
INPUTS = ("pixel_values", "image_grid_thw", "input_ids", "attention_mask", "state",
          "embodiment_id", "noise")  # fmt: skip


def golden_cases(path: Path) -> list[GoldenCase]:
    """Return the checks of one case, in float32 and in bfloat16; none for real-time chunking."""
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    if json.loads(meta["rtc_options"]) is not None:
        return []
    tensors = load_file(path)
    inputs = {name: tensors[f"in.{name}"].contiguous() for name in INPUTS}
    images = len(inputs["image_grid_thw"])
    return [
        GoldenCase(
            inputs=inputs,
            wanted=tensors["out.action_pred"],
            dtype="bf16" if narrow else "fp32",
            cameras=images // len(inputs["input_ids"]),
            tokens=inputs["input_ids"].shape[1],
            steps=int(meta["num_inference_timesteps"]),
            measure="largest",
            limit=ATOL_BF16 if narrow else ATOL_FP32,
        )
        for narrow in (False, True)
    ]


GR00T_N17 = Model(
    name="gr00t_n17",
    of_depth=GrootSizes.of_depth,
    from_folder=GrootSizes.from_folder,
    peers={"phyai": "groot.ours", "hf": "groot.hf", "hf-kv-cache": "groot.hf"},
    golden_cases=golden_cases,
    released_layers=RELEASED_LAYERS,
    least_layers=LEAST_LAYERS,
    tokens=24,
    steps=4,
    pads=False,
)
