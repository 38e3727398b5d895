"""Peer ``diffusers`` of Cosmos3: its pipeline as deployed, eager PyTorch, token ids given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers  # type: ignore[import-not-found]
import torch
import transformers
from benchmarks.peers.base import Refused, Setup, Stages
from benchmarks.peers.cosmos.batch import Batch, expected_bytes, one_row
from benchmarks.peers.cosmos.hf_pipeline import TimedPipeline, action_of, load
from benchmarks.peers.cosmos.sizes import Kind
from torch import Tensor

KINDS: dict[str, Kind] = {"cosmos3_policy": "policy", "cosmos3": "video"}


def peer(model: str, name: str, options: str) -> DiffusersCosmos:
    return DiffusersCosmos(KINDS[model])


class DiffusersCosmos:
    """``Cosmos3OmniPipeline``; everything it does per request is timed, but for tokenizing."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.pipeline: TimedPipeline | None = None
        self.batch: Batch | None = None
        self.request: dict[str, Any] = {}

    def describe(self) -> dict[str, Any]:
        return {
            "name": "diffusers",
            "versions": {
                "diffusers": diffusers.__version__,
                "transformers": transformers.__version__,
            },
            "computes": "Cosmos3OmniPipeline as deployed, PyTorch eager; in every step also the "
            "whole text expert, rotary tables and a time embedding per token; the autoencoder "
            + ("sees the frame 33 times" if self.kind == "policy" else "encodes a black clip first")
            + "; one row at a time, no safety checker",
        }

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup, self.kind)

    def load(self, setup: Setup) -> dict[str, Any]:
        pipeline = load(setup.checkpoint, setup.dtype, self.kind)
        self.pipeline = pipeline
        return {
            "transformer_dtype": str(pipeline.transformer.dtype),
            "vae_dtype": str(pipeline.vae.dtype),
        }

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        if self.pipeline is None:
            raise Refused("inputs must follow load.")
        batch = one_row(Batch.from_file(path, steps), "diffusers")
        with torch.no_grad():
            self.request = self._request(self.pipeline, batch)
        self.batch = batch
        frames = batch.latents.shape[2]
        patches = batch.latents[0, 0].numel() // frames
        return {"prefix_positions": batch.positions, "latent_values_per_frame": patches}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        pipeline, batch = self.pipeline, self.batch
        if pipeline is None or batch is None:
            raise Refused("run must follow inputs.")
        stage = Stages()
        pipeline.stage = stage
        with stage("loop"):  # all that is neither encoding nor decoding, of which there is little
            found = pipeline(**self.request)
        for inner in ("vision", "decode"):
            stage.seconds["loop"] -= stage.seconds.get(inner, 0.0)
        if self.kind == "policy":
            return found.action[0][None], stage.seconds
        assert pipeline.last_latents is not None
        return pipeline.last_latents, stage.seconds

    def _request(self, pipeline: TimedPipeline, batch: Batch) -> dict[str, Any]:
        """Return the pipeline's arguments; the first frame is in the latents already."""
        pipeline.take(batch)
        request = {
            "prompt": "",
            "fps": batch.fps,
            "num_inference_steps": batch.steps,
            "guidance_scale": batch.guidance,
        }
        if self.kind == "policy":
            action, latents, actions = action_of(pipeline, batch)
            return {
                **request,
                "action": action,
                "latents": latents,
                "action_latents": actions,
                "output_type": "latent",
            }
        _, _, frames, height, width = batch.latents.shape
        side, time = pipeline.vae_scale_factor_spatial, pipeline.vae_scale_factor_temporal
        return {
            **request,
            "latents": batch.latents,
            "num_frames": 1 + time * (frames - 1),
            "height": side * height,
            "width": side * width,
            "output_type": "pt",
            "callback_on_step_end": pipeline.keep,
        }
