"""Peers ``hf`` and ``hf-sdpa`` of MiniCPM-RobotManip: the official wiring, eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers  # type: ignore[import-not-found]
from benchmarks.peers.base import Refused, Setup, Stages
from benchmarks.peers.minicpm.batch import Batch, expected_bytes
from benchmarks.peers.minicpm.hf_network import OfficialMiniCPM, linear_attention, load
from torch import Tensor

ATTENTION = {"hf": "eager", "hf-sdpa": "sdpa"}


def peer(model: str, name: str, options: str) -> HfMiniCPM:
    return HfMiniCPM(name)


class HfMiniCPM:
    """One variant of the official wiring."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.model: OfficialMiniCPM | None = None
        self.batch: Batch | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.variant,
            "versions": {"transformers": transformers.__version__},
            "computes": f"official wiring, PyTorch eager, {ATTENTION[self.variant]} attention, "
            f"float32 head; linear attention by {linear_attention()}",
        }

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup)

    def load(self, setup: Setup) -> dict[str, Any]:
        model = load(setup.checkpoint, setup.dtype, attention=ATTENTION[self.variant])
        self.model = model
        return {
            "vlm_dtype": str(model.vlm.language_model.norm.weight.dtype),
            "head_dtype": str(model.action_head.future_tokens.weight.dtype),
            "attention": model.attention,
            "linear_attention": linear_attention(),
        }

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        self.batch = Batch.from_file(path, steps)
        return {"prefix_positions": self.batch.positions}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        model, batch = self.model, self.batch
        if model is None or batch is None:
            raise Refused("run must follow inputs.")
        stage = Stages()
        with torch.no_grad():
            if batch.vl_embs is not None:
                features = batch.vl_embs
            else:
                with stage("vision"):
                    seen = model.embed_images(batch)
                with stage("prefix"):
                    features = model.encode(batch, seen)
            if batch.noise is None:
                return features, stage.seconds
            with stage("loop"):
                actions = model.denoise(batch, features)
        return actions, stage.seconds
