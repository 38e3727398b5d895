"""Peer ``lerobot``: the policy of the PyPI package, called through its public class.

Needs lerobot >= 0.6, so Python >= 3.12. Where the package or its modules are named otherwise, the
peer refuses; it never falls back to something else.
"""

from __future__ import annotations

import importlib
from importlib.metadata import version
from typing import Any

import torch
from benchmarks.peers.base import Batch, Refused, Setup, activation_bytes, weight_bytes
from benchmarks.peers.sizes import LM_HEAD, RELEASED_LAYERS, UNUSED, Sizes
from torch import Tensor

EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"


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
        weights = weight_bytes(setup.sizes, setup.dtype, float32_vision=True)
        heads = 2 * setup.sizes.text.vocab_size * 3072  # both unused output heads stay in memory
        return weights + heads + activation_bytes(setup)

    def load(self, setup: Setup) -> dict[str, Any]:
        if setup.sizes.text.num_hidden_layers != RELEASED_LAYERS:
            raise Refused(
                f"lerobot must be measured at all {RELEASED_LAYERS} layers; got "
                f"{setup.sizes.text.num_hidden_layers}. Leave out --layers, or use peer hf."
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
            for name, _ in Sizes.tensors(setup.sizes):
                target = EMBEDDING if name == LM_HEAD else name
                if target not in own:
                    raise Refused(f"lerobot {self.version} has no parameter {target!r}.")
                own[target].data.copy_(file.get_tensor(name))
                left.discard(target)
        if left:
            raise Refused(f"lerobot {self.version} has parameters we do not fill: {min(left)!r}.")

    def inputs(self, batch: Batch) -> dict[str, Any]:
        assert self.setup is not None
        self.batch = batch.padded(self.setup.cameras, self.setup.tokens)
        cameras, tokens = self.batch.images.shape[1], self.batch.tokens.shape[1]
        return {"prefix_positions": self.setup.sizes.positions(cameras, tokens)}

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
