"""Our side of GR00T N1.7: PhyAI through its public Engine and the plugin's model request."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.groot.batch import Batch, expected_bytes
from benchmarks.peers.options import engine_settings, split_options
from benchmarks.peers.timing import stages_of
from torch import Tensor

from phyai import Engine, EngineArgs
from phyai.engine_builder import config_from_mapping
from phyai.models.gr00t import GrootArgs, GrootRequest


def peer(model: str, name: str, options: str) -> PhyaiGroot:
    return PhyaiGroot(model, options)


class PhyaiGroot:
    """One engine on the CPU.

    model: the plugin.  options: settings, such as ``config.runtime.graph_backend=inductor``.
    """

    def __init__(self, model: str, options: str = "") -> None:
        self.model, self.options = model, options
        self.plugin, self.config = split_options(options)
        self.engine: Engine | None = None
        self.batch: Batch | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": "phyai",
            "versions": {name: version(name) for name in ("phyai-core", "phyai-models-groot")},
            "computes": f"PhyAI engine, plugin {self.model} {self.options}".strip(),
        }

    def estimate(self, setup: Setup) -> int:
        return expected_bytes(setup)

    def load(self, setup: Setup) -> dict[str, Any]:
        precision = str(self.plugin.get("precision", setup.dtype))
        if precision not in (setup.dtype, {"fp32": "float32", "bf16": "bfloat16"}[setup.dtype]):
            raise Refused(
                f"precision must fit --dtype {setup.dtype}; got {precision!r}. Leave it out."
            )
        args = GrootArgs(
            checkpoint_dir=setup.checkpoint,
            max_batch_size=setup.rows,
            **{**self.plugin, "precision": precision},
        )
        config = config_from_mapping(engine_settings(self.config, setup), directory=".")
        self.engine = Engine(EngineArgs(self.model, args, config))
        return {"precision": precision}

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        self.batch = Batch.from_file(path, steps)
        return {"prefix_positions": self.batch.positions}

    def run(self) -> tuple[Tensor, dict[str, float]]:
        engine, batch = self.engine, self.batch
        if engine is None or batch is None:
            raise Refused("run must follow inputs.")
        counters = engine.core.services.profile.counters
        before = counters["vl_tokens"]
        actions = engine.step(
            GrootRequest(
                pixel_values=batch.pixel_values,
                image_grid_thw=batch.image_grid_thw,
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                state=batch.state,
                embodiment_id=batch.embodiment_id,
                noise=batch.noise,
                num_steps=batch.steps,
            )
        )
        computed, valid = counters["vl_tokens"] - before, int(batch.attention_mask.sum())
        if computed not in (0, valid):  # graphs do not count
            raise Refused(
                f"our side must compute the {valid} valid positions; it computed {computed}. "
                "Report the difference as a bug."
            )
        return actions.to(torch.float32), stages_of(engine.core.last_timing)
