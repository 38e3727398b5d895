"""Our side of MiniCPM-RobotManip: PhyAI by its public Engine and the plugin's model request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.base import Setup
from benchmarks.peers.engine_side import Asked, EngineSide
from benchmarks.peers.minicpm.batch import Batch, expected_bytes

from phyai.models.minicpm_robot import MiniCPMRobotArgs, MiniCPMRobotRequest


def peer(model: str, name: str, options: str) -> PhyaiMiniCPM:
    return PhyaiMiniCPM(model, options)


class PhyaiMiniCPM(EngineSide):
    """One engine on the CPU; its head is in float32 in both dtypes, as the official one is."""

    distribution = "phyai-models-minicpm"

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup)

    def args(self, **fields: Any) -> MiniCPMRobotArgs:
        return MiniCPMRobotArgs(**fields)

    def ask(self, path: Path, steps: int, setup: Setup) -> Asked:
        batch = Batch.from_file(path, steps)
        request = MiniCPMRobotRequest(
            input_ids=batch.input_ids,
            pixel_values=batch.pixel_values,
            target_sizes=batch.target_sizes,
            vl_embs=batch.vl_embs,
            state=batch.state,
            embodiment_id=batch.embodiment_id,
            noise=batch.noise,
            num_steps=batch.steps,
        )
        if batch.input_ids is not None:
            return Asked(request, batch.positions, "text_tokens", batch.input_ids.numel())
        # Given features skip the language model; the head still reads every one of them.
        assert batch.vl_embs is not None
        valid = batch.vl_embs.shape[:2].numel()
        return Asked(request, batch.positions, "cross_kv_tokens", valid)
