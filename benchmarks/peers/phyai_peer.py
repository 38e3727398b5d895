"""Our side: PhyAI through its public Engine and the model request of plugin ``pi05``."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import torch
from benchmarks.peers.base import Batch, Refused, Setup, activation_bytes, weight_bytes
from torch import Tensor

from phyai import Engine, EngineArgs
from phyai.engine_builder import config_from_mapping
from phyai.models.pi05 import PI05Args, PI05Request

PRECISIONS = {"bf16": "bf16_openpi", "fp32": "fp32"}
STAGES = {"encode/vision": "vision", "encode/prefix": "prefix", "solve": "loop"}


class PhyaiPeer:
    """One engine on the CPU.

    options: settings, such as ``precision=bf16_lerobot config.runtime.graph_backend=inductor``.
        ``config.*`` and ``kernel_policy`` are the engine's; other names are the plugin's arguments.
    """

    def __init__(self, options: str = "") -> None:
        self.options = options
        self.plugin, self.config = split_options(options)
        self.engine: Engine | None = None
        self.setup: Setup | None = None
        self.request: PI05Request | None = None
        self.valid = 0

    def describe(self) -> dict[str, Any]:
        return {
            "name": "phyai",
            "versions": {name: version(name) for name in ("phyai-core", "phyai-models-pi")},
            "computes": f"PhyAI engine, plugin pi05 {self.options}".strip(),
        }

    def estimate(self, setup: Setup) -> int:
        wide = self._precision(setup) == "bf16_lerobot"
        weights = weight_bytes(setup.sizes, setup.dtype, float32_vision=wide)
        return weights + activation_bytes(setup)

    def _precision(self, setup: Setup) -> str:
        return str(self.plugin.get("precision", PRECISIONS[setup.dtype]))

    def load(self, setup: Setup) -> dict[str, Any]:
        precision = self._precision(setup)
        if (precision in ("fp32", "float32")) != (setup.dtype == "fp32"):
            raise Refused(
                f"precision must fit --dtype {setup.dtype}; got {precision!r}. Leave it out."
            )
        config = {**self.config, "config": dict(self.config.get("config", {}))}
        dtype = "float32" if setup.dtype == "fp32" else "bfloat16"
        config["config"].setdefault("device", {"target": "cpu", "params_dtype": dtype})
        runtime = dict(config["config"].get("runtime", {}))
        config["config"]["runtime"] = {"num_threads": setup.threads, **runtime}
        args = PI05Args(
            checkpoint_dir=setup.checkpoint,
            max_batch_size=setup.rows,
            **{**self.plugin, "precision": precision},
        )
        engine_config = config_from_mapping(config, directory=".")
        self.engine = Engine(EngineArgs("pi05", args, engine_config))
        self.setup = setup
        return {"precision": precision}

    def inputs(self, batch: Batch) -> dict[str, Any]:
        assert self.engine is not None
        assert self.setup is not None
        batch = batch.padded(self.setup.cameras, self.setup.tokens)
        self.request = PI05Request(
            pixel_values=batch.images,
            input_ids=batch.tokens,
            lang_lens=batch.token_mask.sum(1),
            noise=batch.noise,
            image_masks=batch.image_masks,
            num_steps=batch.steps,
        )
        sizes = self.setup.sizes
        valid = batch.image_masks.sum(1) * sizes.vision.patches + batch.token_mask.sum(1)
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


def split_options(options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plugin's arguments and the engine's settings of ``name=value`` words.

    A value is JSON where it reads as JSON, else text. Raises: Refused for a word without ``=``.
    """
    plugin: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for word in options.split():
        name, equals, text = word.partition("=")
        if not equals:
            raise Refused(f"options of our side must be name=value; got {word!r}.")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        parts = name.split(".")
        table = engine if parts[0] in ("config", "kernel_policy") else plugin
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = value
    return plugin, engine
