"""Peers ``hf``: the official wiring on transformers' modules, eager; compiled; bf16 vision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers  # type: ignore[import-not-found]
from benchmarks.peers.base import Refused, Setup, Stages
from benchmarks.peers.pi.batch import Batch, activation_bytes, weight_bytes
from benchmarks.peers.pi.hf_load import load
from benchmarks.peers.pi.hf_network import OfficialPi
from benchmarks.peers.pi.sizes import PiSizes
from torch import Tensor

COMPUTES = {
    "hf": "official wiring, PyTorch eager, official dtypes (float32 vision tower in bf16)",
    "hf-compiled": "official wiring under torch.compile, official dtypes",
    "hf-bf16-vision": "official wiring, PyTorch eager, bfloat16 vision tower",
}


def peer(model: str, name: str, options: str) -> HfPeer:
    return HfPeer(name)


class HfPeer:
    """One variant of the official wiring."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.model: OfficialPi | None = None
        self.batch: Batch | None = None
        self.setup: Setup | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.variant,
            "versions": {"transformers": transformers.__version__},
            "computes": COMPUTES[self.variant],
        }

    def estimate(self, setup: Setup) -> int:
        wide = self.variant != "hf-bf16-vision"
        compiler = 2**30 if self.variant == "hf-compiled" else 0
        weights = weight_bytes(
            PiSizes.from_folder(setup.checkpoint), setup.dtype, float32_vision=wide
        )
        return weights + activation_bytes(setup) + compiler

    def load(self, setup: Setup) -> dict[str, Any]:
        self.setup = setup
        self.model = load(
            setup.checkpoint,
            setup.dtype,
            bf16_vision=self.variant == "hf-bf16-vision",
            official_rope=setup.rope_frequencies == "official",
        )
        if self.variant == "hf-compiled":
            self.model.compile()  # the whole request, as the official compile_model does
        vision = self.model.projector.weight.dtype
        return {"stack_dtype": str(self.model.stack_dtype), "vision_dtype": str(vision)}

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        assert self.setup is not None
        assert self.model is not None
        batch = Batch.from_file(path, steps)
        self.batch = batch.padded(self.setup.cameras, self.setup.tokens)
        positions = self.model.sizes.positions(self.setup.cameras, self.setup.tokens)
        return {"prefix_positions": positions}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        model, batch = self.model, self.batch
        if model is None or batch is None:
            raise Refused("run must follow inputs.")
        with torch.no_grad():
            if self.variant == "hf-compiled":
                actions = model(
                    batch.images, batch.image_masks, batch.tokens, batch.token_mask, batch.noise,
                    batch.steps, batch.state,
                )  # fmt: skip
                return actions, {}
            stage = Stages()
            with stage("vision"):
                features = model.embed_images(batch.images)
            with stage("prefix"):
                prefix, valid = model.prefill(
                    features, batch.image_masks, batch.tokens, batch.token_mask
                )
            with stage("loop"):
                actions = model.denoise(batch.noise, prefix, valid, batch.steps, batch.state)
        return actions, stage.seconds
