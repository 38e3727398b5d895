"""Peers ``hf`` and ``hf-kv-cache`` of GR00T N1.7: the official wiring, eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers  # type: ignore[import-not-found]
from benchmarks.peers.base import Refused, Setup, Stages
from benchmarks.peers.groot.batch import Batch, expected_bytes
from benchmarks.peers.groot.hf_network import OfficialGroot, load
from torch import Tensor

COMPUTES = {
    "hf": "official wiring as released, PyTorch eager, one dtype",
    "hf-kv-cache": "official wiring with K and V of cross attention once a request, as in newer "
    "official code, PyTorch eager, one dtype",
}


def peer(model: str, name: str, options: str) -> HfGroot:
    return HfGroot(name)


class HfGroot:
    """One variant of the official wiring."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.model: OfficialGroot | None = None
        self.batch: Batch | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.variant,
            "versions": {"transformers": transformers.__version__},
            "computes": COMPUTES[self.variant],
        }

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup)

    def load(self, setup: Setup) -> dict[str, Any]:
        self.model = load(setup.checkpoint, setup.dtype, keep_keys=self.variant == "hf-kv-cache")
        return {"dtype": str(self.model.dtype)}

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        self.batch = Batch.from_file(path, steps)
        return {"prefix_positions": self.batch.positions}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        model, batch = self.model, self.batch
        if model is None or batch is None:
            raise Refused("run must follow inputs.")
        stage = Stages()
        with torch.no_grad():
            with stage("vision"):
                seen = model.embed_images(batch)
            with stage("prefix"):
                features, images, valid = model.encode(batch, seen)
            with stage("loop"):
                actions = model.denoise(batch, features, images, valid)
        return actions, stage.seconds
