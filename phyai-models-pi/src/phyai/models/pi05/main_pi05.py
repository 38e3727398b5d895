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
    """Arguments of plugin ``pi05``; see PiArgs.

    >>> from phyai.models.pi05 import PI05Args
    >>> PI05Args(checkpoint_dir="org/name", precision="bf16", max_batch_size=4).max_batch_size
    4
    """


@dataclass(frozen=True)
class PI05Request(PiRequest):
    """Preprocessed inputs of pi0.5; the state is part of the prompt tokens. See PiRequest.

    >>> import torch
    >>> from phyai.models.pi05 import PI05Request
    >>> pixels, ids = torch.zeros(1, 3, 3, 224, 224), torch.ones(1, 200, dtype=torch.int64)
    >>> PI05Request(pixels, ids, lang_lens=torch.tensor([12]), num_steps=10).num_steps
    10
    """


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
