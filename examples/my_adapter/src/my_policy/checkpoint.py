"""Writes the policy's own checkpoint format: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path

import torch
from phyai.kernels import CATALOGUE, KernelTable
from phyai.layers import Placement
from phyai.weights import randomize, save_safetensors
from phyai.weights.binding import collect_claims
from torch import Tensor, nn

from my_policy.config import PolicyConfig
from my_policy.network import Encoder, FlowDenoiser


def build(config: PolicyConfig, seed: int) -> tuple[Encoder, FlowDenoiser]:
    """Return the modules with random float32 weights, over plain torch operations.

    Plain operations have gradients, so a training script can use the very modules that run.
    """
    plain = KernelTable(row for row in CATALOGUE if row.reference)
    at = Placement(plain, torch.device("cpu"), torch.float32)
    encoder, network = Encoder(config, at), FlowDenoiser(config, at)
    randomize(nn.ModuleList([encoder, network]), seed, scheme=_scale)
    return encoder, network


def _scale(name: str, value: Tensor) -> tuple[float, float] | None:
    """Return mean and deviation of a parameter's first values; None is randomize's own choice."""
    if name.endswith(".words"):
        return 0.0, 0.5  # a prompt weighs as much as what it is added to
    return (1.0, 0.02) if "norm" in name and name.endswith(".weight") else None


def write(folder: Path, config: PolicyConfig, *modules: nn.Module) -> None:
    """Write a checkpoint; fused parameters are taken apart again."""
    config.save(folder)
    save_safetensors(checkpoint_tensors(nn.ModuleList(modules)), folder / "model.safetensors")


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter under its checkpoint name."""
    tensors = {}
    for claim in collect_claims(model):
        value, sizes = claim.param.detach(), getattr(claim.loader, "sizes", None)
        if sizes is not None and claim.shard_id is not None:
            value = torch.split(value, sizes)[claim.shard_id]
        tensors[claim.keys[0]] = value.clone()
    return tensors
