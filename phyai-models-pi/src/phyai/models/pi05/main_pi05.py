"""pi0.5: arguments, model request and adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from phyai.models.pi.adapter import PiAdapter, PiArgs, PiRequest
from phyai.models.pi.config import PiConfig
from phyai.models.pi.cost import PiCost
from phyai.models.pi05.denoiser import PI05Denoiser

PI05Config = PiConfig


@dataclass
class PI05Args(PiArgs):
    """Arguments of plugin ``pi05``; see PiArgs."""


@dataclass(frozen=True)
class PI05Request(PiRequest):
    """Preprocessed inputs of pi0.5; the state is part of the prompt tokens. See PiRequest."""


class PI05Adapter(PiAdapter):
    """pi0.5: prompt with discretised state, adaRMS expert."""

    name = "pi05"
    model = "pi05"
    args_cls = PI05Args
    request_cls = PI05Request
    denoiser_cls: ClassVar[type[PI05Denoiser]] = PI05Denoiser


def cost(args: PI05Args) -> PiCost:
    """Return what a checkpoint costs by its sizes."""
    return PiCost("pi05", args, PI05Request)
