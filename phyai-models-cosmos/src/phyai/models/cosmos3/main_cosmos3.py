"""Cosmos3: the names its plugin modules and its users import."""

from __future__ import annotations

from phyai.models.cosmos3.args import CheckpointArgs, Cosmos3Args, Cosmos3PolicyArgs
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.cost import Cosmos3Cost
from phyai.models.cosmos3.generation import Cosmos3GenerationPostProcessor, Cosmos3Processor
from phyai.models.cosmos3.generation_adapter import Cosmos3Adapter
from phyai.models.cosmos3.policy import Cosmos3PolicyProcessor
from phyai.models.cosmos3.policy_adapter import Cosmos3PolicyAdapter
from phyai.models.cosmos3.request import (
    Cosmos3ActionRequest,
    Cosmos3T2VRequest,
    pixel_to_latent_shape,
)

__all__ = [
    "Cosmos3ActionRequest",
    "Cosmos3Adapter",
    "Cosmos3Args",
    "Cosmos3Config",
    "Cosmos3GenerationPostProcessor",
    "Cosmos3PolicyAdapter",
    "Cosmos3PolicyArgs",
    "Cosmos3PolicyProcessor",
    "Cosmos3Processor",
    "Cosmos3T2VRequest",
    "cost",
    "pixel_to_latent_shape",
]


def cost(args: CheckpointArgs) -> Cosmos3Cost:
    """Return what a checkpoint costs by its sizes."""
    return Cosmos3Cost(args)
