"""Our side of GR00T N1.7: PhyAI through its public Engine and the plugin's model request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.base import Setup
from benchmarks.peers.engine_side import Asked, EngineSide
from benchmarks.peers.groot.batch import Batch, expected_bytes

from phyai.models.gr00t import GrootArgs, GrootRequest


def peer(model: str, name: str, options: str) -> PhyaiGroot:
    return PhyaiGroot(model, options)


class PhyaiGroot(EngineSide):
    """One engine on the CPU."""

    distribution = "phyai-models-groot"

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup)

    def args(self, **fields: Any) -> GrootArgs:
        return GrootArgs(**fields)

    def ask(self, path: Path, steps: int, setup: Setup) -> Asked:
        batch = Batch.from_file(path, steps)
        request = GrootRequest(
            pixel_values=batch.pixel_values,
            image_grid_thw=batch.image_grid_thw,
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            state=batch.state,
            embodiment_id=batch.embodiment_id,
            noise=batch.noise,
            num_steps=batch.steps,
        )
        return Asked(request, batch.positions, "vl_tokens", int(batch.attention_mask.sum()))
