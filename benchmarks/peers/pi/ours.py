"""Our side of pi0 and pi0.5: PhyAI through its public Engine and the plugin's model request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.base import Setup
from benchmarks.peers.engine_side import Asked, EngineSide
from benchmarks.peers.pi.batch import Batch, activation_bytes, weight_bytes
from benchmarks.peers.pi.sizes import PiSizes

from phyai.models.pi0 import PI0Args, PI0Request
from phyai.models.pi05 import PI05Args, PI05Request

PRECISIONS = {"bf16": "bf16_openpi", "fp32": "fp32"}
STAGES = {"encode/vision": "vision", "encode/prefix": "prefix", "solve": "loop"}
CLASSES: dict[str, tuple[Any, Any]] = {
    "pi0": (PI0Args, PI0Request),
    "pi05": (PI05Args, PI05Request),
}


def peer(model: str, name: str, options: str) -> PhyaiPi:
    return PhyaiPi(model, options)


class PhyaiPi(EngineSide):
    """One engine on the CPU; ``precision=bf16_lerobot`` is one more of its options."""

    distribution = "phyai-models-pi"

    def estimate(self, setup: Setup) -> int:
        wide = self.precision(setup) == "bf16_lerobot"
        sizes = PiSizes.from_folder(setup.checkpoint)
        return weight_bytes(sizes, setup.dtype, float32_vision=wide) + activation_bytes(setup)

    def precision(self, setup: Setup) -> str:
        return str(self.plugin.get("precision", PRECISIONS[setup.dtype]))

    def args(self, **fields: Any) -> Any:
        return CLASSES[self.model][0](**fields)

    def ask(self, path: Path, steps: int, setup: Setup) -> Asked:
        batch = Batch.from_file(path, steps).padded(setup.cameras, setup.tokens)
        fields: dict[str, Any] = {
            "pixel_values": batch.images,
            "input_ids": batch.tokens,
            "lang_lens": batch.token_mask.sum(1),
            "noise": batch.noise,
            "image_masks": batch.image_masks,
            "num_steps": batch.steps,
        }
        if batch.state is not None:
            fields["state"] = batch.state
        patches = PiSizes.from_folder(setup.checkpoint).vision.patches
        valid = batch.image_masks.sum(1) * patches + batch.token_mask.sum(1)
        request = CLASSES[self.model][1](**fields)
        return Asked(request, int(valid.max()), "prefix_tokens", int(valid.sum()))

    def stages(self, timing: dict[str, float]) -> dict[str, float]:
        return {name: timing[key] / 1e3 for key, name in STAGES.items() if key in timing}
