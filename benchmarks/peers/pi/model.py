"""pi0 and pi0.5 as models to pair."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from benchmarks.peers.model import GoldenCase, Model, Shares
from benchmarks.peers.pi.sizes import RELEASED_LAYERS, PiSizes
from safetensors import safe_open
from safetensors.torch import load_file

ATOL_FP32 = 5e-5
REL_BF16 = 0.02
"""Twice what bfloat16 itself costs on these cases; another CPU rounds its products otherwise."""
INPUTS = ("images", "image_masks", "tokens", "token_mask", "noise", "state")


def golden_cases(path: Path) -> list[GoldenCase]:
    """Return the check of one plain case, in the dtype it was made in."""
    with safe_open(path, framework="pt") as file:
        meta = file.metadata()
    tensors = load_file(path)
    inputs = {
        name: tensors[f"in.{name}"].contiguous() for name in INPUTS if f"in.{name}" in tensors
    }
    narrow = meta["dtype"].startswith("bfloat16")
    return [
        GoldenCase(
            inputs=inputs,
            wanted=tensors["actions"],
            dtype="bf16" if narrow else "fp32",
            cameras=inputs["images"].shape[1],
            tokens=inputs["tokens"].shape[1],
            steps=int(meta["num_steps"]),
            measure="norm" if narrow else "largest",
            limit=REL_BF16 if narrow else ATOL_FP32,
        )
    ]


_HF = dict.fromkeys(("hf", "hf-compiled", "hf-bf16-vision"), "pi.hf")

PI05 = Model(
    name="pi05",
    of_depth=partial(PiSizes.of_depth, model="pi05"),
    from_folder=PiSizes.from_folder,
    peers={"phyai": "pi.ours", **_HF, "openvino": "pi.openvino", "lerobot": "pi.lerobot"},
    golden_cases=golden_cases,
    released_layers=RELEASED_LAYERS,
    # Official code in bf16, eager: 2.65, 3.27 and 1.62 s. A re-coding whose shares are elsewhere
    # is another program.
    shares=Shares(968, {"vision": 0.351, "prefix": 0.434, "loop": 0.215}),
)

PI0 = Model(
    name="pi0",
    of_depth=partial(PiSizes.of_depth, model="pi0"),
    from_folder=PiSizes.from_folder,
    peers={"phyai": "pi.ours", **_HF},
    golden_cases=golden_cases,
    released_layers=RELEASED_LAYERS,
)
