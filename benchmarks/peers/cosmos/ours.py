"""Our side of Cosmos3: PhyAI through its public Engine and the plugins' model requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.cosmos.batch import Batch, expected_bytes
from benchmarks.peers.cosmos.sizes import CosmosSizes, Kind
from benchmarks.peers.engine_side import Asked, EngineSide
from torch import Tensor

from phyai.models.cosmos3 import (
    Cosmos3ActionRequest,
    Cosmos3Args,
    Cosmos3PolicyArgs,
    Cosmos3T2VRequest,
)

KINDS: dict[str, Kind] = {"cosmos3_policy": "policy", "cosmos3": "video"}
SCHEDULE = "diffusers_flow"


def peer(model: str, name: str, options: str) -> PhyaiCosmos:
    return PhyaiCosmos(model, options)


class PhyaiCosmos(EngineSide):
    """One engine on the CPU; nothing is carried over from one run to the next.

    remember: with ``remember=true`` among the options it keeps what it has of the texts; a later
        run is the same instruction with another picture, as a robot asks.
    """

    distribution = "phyai-models-cosmos"

    def __init__(self, model: str, options: str = "") -> None:
        super().__init__(model, options)
        self.remember = bool(self.plugin.pop("remember", False))
        self.kind, self.seen = KINDS[model], 0

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup, self.kind)

    def args(self, **fields: Any) -> Cosmos3Args | Cosmos3PolicyArgs:
        made = Cosmos3PolicyArgs if self.kind == "policy" else Cosmos3Args
        return made(**fields)

    def ask(self, path: Path, steps: int, setup: Setup) -> Asked:
        batch = Batch.from_file(path, steps)
        request = self._policy(batch) if self.kind == "policy" else self._video(batch)
        valid = 0 if self.remember else len(batch.noise) * batch.positions
        return Asked(request, batch.positions, "und_tokens", valid)

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        found = super().inputs(path, steps)
        if self.remember:
            self._forget()
            self.step(self._asked().request)
        return found

    def run(self) -> tuple[Tensor, dict[str, float]]:
        if not self.remember:
            self._forget()
        return super().run()

    def step(self, request: Any) -> Tensor:
        engine = self._engine()
        if self.kind == "policy":
            if self.remember:
                request = self._another_picture(request)
            actions: Tensor = engine.step(request)["action"]
            return actions
        with engine.core.services.profile.recorder.recording(["result.video"]) as recorded:
            engine.step(request)
        latents: Tensor = recorded["result.video"][-1]
        return latents

    def stages(self, timing: dict[str, float]) -> dict[str, float]:
        """Return the stages; prefix is the text of both branches and what the steps read of it."""
        seen, decoded = timing.get("encode/vae", 0.0), timing.get("output/vae", 0.0)
        found = {
            "vision": seen,
            "prefix": timing["encode"] - seen,
            "loop": timing["solve"],
            "decode": decoded,
        }
        return {name: ms / 1e3 for name, ms in found.items() if ms}

    def _policy(self, batch: Batch) -> Cosmos3ActionRequest:
        assert batch.image is not None
        assert batch.domain_id is not None
        rows, chunk, raw = batch.noise.shape
        sizes = self._sizes()
        noise = torch.zeros(rows, chunk, sizes.transformer["action_dim"])
        noise[..., :raw] = batch.noise
        return Cosmos3ActionRequest(
            **self._common(batch),
            noise={"action": noise, "video": batch.latents},
            domain_id=batch.domain_id,
            action_chunk=chunk,
            raw_action_dim=raw,
            # As a processor makes it of a camera's frame.
            cond_video_pixels=batch.image.float().div(127.5).sub(1).permute(0, 3, 1, 2)[:, :, None],
            action_start_frame_offset=1,
        )

    def _video(self, batch: Batch) -> Cosmos3T2VRequest:
        return Cosmos3T2VRequest(**self._common(batch), noise={"video": batch.latents})

    def _common(self, batch: Batch) -> dict[str, Any]:
        return {
            "text_ids": batch.input_ids,
            "neg_text_ids": batch.neg_input_ids if batch.guided else None,
            "video_shape": tuple(batch.latents.shape[2:]),
            "fps": batch.fps,
            "num_inference_steps": batch.steps,
            "guidance_scale": batch.guidance,
            "flow_shift": batch.flow_shift,
            "schedule": SCHEDULE,
        }

    def _sizes(self) -> CosmosSizes:
        assert self.setup is not None
        return CosmosSizes.from_folder(self.setup.checkpoint, kind=self.kind)

    def _another_picture(self, request: Cosmos3ActionRequest) -> Cosmos3ActionRequest:
        """Return the request with a change of its picture that no result shows."""
        assert request.cond_video_pixels is not None
        self.seen += 1
        pixels = request.cond_video_pixels.clone()
        corner = pixels[0, 0, 0, 0]
        corner[0] -= 1e-7 * self.seen * float(corner[0].sign())
        return replace(request, cond_video_pixels=pixels)

    def _forget(self) -> None:
        self._engine().core.services.memo.clear()

    def _engine(self) -> Any:
        if self.engine is None:
            raise Refused("run must follow inputs.")
        return self.engine

    def _asked(self) -> Asked:
        assert self.asked is not None
        return self.asked
