"""Peer ``lerobot``: the policy of the PyPI package, called through its public class.

Needs lerobot >= 0.6, so Python >= 3.12. Where the package or its modules are named otherwise, the
peer refuses; it never falls back to something else.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.base import Refused, Setup
from benchmarks.peers.pi.batch import Batch, activation_bytes, weight_bytes
from benchmarks.peers.pi.sizes import LM_HEAD, RELEASED_LAYERS, UNUSED, PiSizes
from torch import Tensor

EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


def peer(model: str, name: str, options: str) -> LeRobotPeer:
    return LeRobotPeer()


class LeRobotPeer:
    """Released sizes only: the official config cannot express fewer layers."""

    def __init__(self) -> None:
        self.version = version("lerobot")
        self.policy_class = importlib.import_module(
            "lerobot.policies.pi05.modeling_pi05"
        ).PI05Policy
        self.config_class = importlib.import_module(
            "lerobot.policies.pi05.configuration_pi05"
        ).PI05Config
        self.model: Any = None
        self.setup: Setup | None = None
        self.batch: Batch | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "name": "lerobot",
            "versions": {"lerobot": self.version},
            "computes": "the official policy's sampling, eager, its own dtypes",
        }

    def estimate(self, setup: Setup) -> int:
        sizes = PiSizes.from_folder(setup.checkpoint)
        weights = weight_bytes(sizes, setup.dtype, float32_vision=True)
        heads = 2 * sizes.text.vocab_size * 3072  # both unused output heads stay in memory
        return weights + heads + activation_bytes(setup)

    def load(self, setup: Setup) -> dict[str, Any]:
        layers = PiSizes.from_folder(setup.checkpoint).layers
        if layers != RELEASED_LAYERS:
            raise Refused(
                f"lerobot must be measured at all {RELEASED_LAYERS} layers; got "
                f"{layers}. Leave out --layers, or use peer hf."
            )
        self.setup = setup
        config = self.config_class(
            dtype="bfloat16" if setup.dtype == "bf16" else "float32",
            device="cpu",
            compile_model=False,
            num_inference_steps=setup.steps,
        )
        policy = self.policy_class(config)
        self.model = policy.model
        self._fill(setup)
        self.model.eval().requires_grad_(False)
        return {"stack_dtype": setup.dtype}

    def _fill(self, setup: Setup) -> None:
        """Copy the shared weights over the random ones; strict but for the unused heads."""
        from safetensors import safe_open

        own = dict(self.model.named_parameters())
        left = {name for name in own if not name.startswith(UNUSED) and name != LM_HEAD}
        with safe_open(setup.checkpoint / "model.safetensors", framework="pt") as file:
            for name, _ in PiSizes.from_folder(setup.checkpoint).tensors():
                target = EMBEDDING if name == LM_HEAD else name
                if target not in own:
                    raise Refused(f"lerobot {self.version} has no parameter {target!r}.")
                own[target].data.copy_(file.get_tensor(name))
                left.discard(target)
        if left:
            raise Refused(f"lerobot {self.version} has parameters we do not fill: {min(left)!r}.")

    def inputs(self, path: Path, steps: int) -> dict[str, Any]:
        assert self.setup is not None
        batch = Batch.from_file(path, steps)
        self.batch = batch.padded(self.setup.cameras, self.setup.tokens)
        cameras, tokens = self.batch.images.shape[1], self.batch.tokens.shape[1]
        return {
            "prefix_positions": PiSizes.from_folder(self.setup.checkpoint).positions(
                cameras, tokens
            )
        }

    def run(self) -> tuple[Tensor, dict[str, float]]:
        batch = self.batch
        if batch is None:
            raise Refused("run must follow inputs.")
        with torch.no_grad():
            actions = self.model.sample_actions(
                list(batch.images.unbind(1)),
                list(batch.image_masks.unbind(1)),
                batch.tokens,
                batch.token_mask,
                noise=batch.noise,
                num_steps=batch.steps,
            )
        return actions.float(), {}
