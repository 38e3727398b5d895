"""Our side of pi0 and pi0.5: PhyAI through its public Engine and the plugin's model request."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.options import engine_settings, split_options
from benchmarks.peers.pi.batch import Batch, activation_bytes, weight_bytes
from benchmarks.peers.pi.sizes import PiSizes
from torch import Tensor

from phyai import Engine, EngineArgs
from phyai.engine_builder import config_from_mapping
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


class PhyaiPi:
    """One engine on the CPU.

    model: the plugin.
    options: settings, such as ``precision=bf16_lerobot config.runtime.graph_backend=inductor``.
    """

    def __init__(self, model: str, options: str = "") -> None:
        self.model, self.options = model, options
        self.plugin, self.config = split_options(options)
        self.args_class, self.request_class = CLASSES[model]
        self.engine: Engine | None = None
        self.setup: Setup | None = None
        self.request: Any = None
        self.valid = 0

    def describe(self) -> dict[str, Any]:
        return {
            "name": "phyai",
            "versions": {name: version(name) for name in ("phyai-core", "phyai-models-pi")},
            "computes": f"PhyAI engine, plugin {self.model} {self.options}".strip(),
        }

    def estimate(self, setup: Setup) -> int:
        wide = self._precision(setup) == "bf16_lerobot"
        sizes = PiSizes.from_folder(setup.checkpoint)
        return weight_bytes(sizes, setup.dtype, float32_vision=wide) + activation_bytes(setup)

    def _precision(self, setup: Setup) -> str:
        return str(self.plugin.get("precision", PRECISIONS[setup.dtype]))

    def load(self, setup: Setup) -> dict[str, Any]:
        precision = self._precision(setup)
        if (precision in ("fp32", "float32")) != (setup.dtype == "fp32"):
            raise Refused(
                f"precision must fit --dtype {setup.dtype}; got {precision!r}. Leave it out."
            )
        args = self.args_class(
            checkpoint_dir=setup.checkpoint,
            max_batch_size=setup.rows,
            **{**self.plugin, "precision": precision},
        )
        config = config_from_mapping(engine_settings(self.config, setup), directory=".")
        self.engine = Engine(EngineArgs(self.model, args, config))
        self.setup = setup
        return {"precision": precision}

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        assert self.engine is not None
        assert self.setup is not None
        batch = Batch.from_file(path, steps).padded(self.setup.cameras, self.setup.tokens)
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
        self.request = self.request_class(**fields)
        patches = PiSizes.from_folder(self.setup.checkpoint).vision.patches
        valid = batch.image_masks.sum(1) * patches + batch.token_mask.sum(1)
        self.valid = int(valid.sum())
        return {"prefix_positions": int(valid.max())}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        if self.engine is None or self.request is None:
            raise Refused("run must follow inputs.")
        counters = self.engine.core.services.profile.counters
        before = counters["prefix_tokens"]
        actions = self.engine.step(self.request)
        self._check_positions(counters["prefix_tokens"] - before)
        timing = self.engine.core.last_timing
        stages = {name: timing[key] / 1e3 for key, name in STAGES.items() if key in timing}
        return actions.to(torch.float32), stages

    def _check_positions(self, computed: int) -> None:
        """Raise Refused unless what was counted is what was reported; graphs do not count."""
        if computed not in (0, self.valid):
            raise Refused(
                f"our side must compute the {self.valid} valid prefix positions; it computed "
                f"{computed}. Report the difference as a bug."
            )
