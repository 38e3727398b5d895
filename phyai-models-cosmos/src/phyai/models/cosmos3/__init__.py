"""Cosmos3: adapters, arguments and requests, imported lazily (plugin modules are torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.models.cosmos3.main_cosmos3 import (
        Cosmos3ActionRequest,
        Cosmos3Adapter,
        Cosmos3Args,
        Cosmos3Config,
        Cosmos3GenerationPostProcessor,
        Cosmos3PolicyAdapter,
        Cosmos3PolicyArgs,
        Cosmos3PolicyProcessor,
        Cosmos3Processor,
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
    "pixel_to_latent_shape",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from phyai.models.cosmos3 import main_cosmos3

    return getattr(main_cosmos3, name)
