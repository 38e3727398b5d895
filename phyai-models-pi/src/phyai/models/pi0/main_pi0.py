"""pi0: arguments, model request and adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from phyai.errors import RequestError
from phyai.models.pi.adapter import PiAdapter, PiArgs, PiRequest
from phyai.models.pi.config import PiConfig
from phyai.models.pi.cost import PiCost
from phyai.models.pi0.denoiser import PI0Denoiser
from phyai.request_values import checked

PI0Config = PiConfig


@dataclass
class PI0Args(PiArgs):
    """Arguments of plugin ``pi0``; see PiArgs.

    >>> from phyai.models.pi0 import PI0Args
    >>> PI0Args(checkpoint_dir="org/name", precision="fp32").precision
    'fp32'
    """

    vision_params_dtype: torch.dtype | None = torch.float32


@dataclass(frozen=True)
class PI0Request(PiRequest):
    """Preprocessed inputs of pi0. state: float [B, max_state_dim], normalised and zero padded.

    >>> import torch
    >>> from phyai.models.pi0 import PI0Request
    >>> pixels, ids = torch.zeros(1, 3, 3, 224, 224), torch.ones(1, 48, dtype=torch.int64)
    >>> PI0Request(pixels, ids, torch.tensor([12]), state=torch.zeros(1, 32)).state.shape
    torch.Size([1, 32])
    """

    state: Tensor | None = None


class PI0Adapter(PiAdapter):
    """pi0: state token in the suffix, time mixed into the action embeddings."""

    name = "pi0"
    model = "pi0"
    args_cls = PI0Args
    request_cls = PI0Request
    denoiser_cls: ClassVar[type[PI0Denoiser]] = PI0Denoiser
    needs_state = True

    def _request_state(self, request: PiRequest, rows: int) -> Tensor:
        state = request.state if isinstance(request, PI0Request) else None
        if state is None:
            raise RequestError(
                f"state expected shape [{rows}, {self.pi.max_state_dim}]; got none. "
                "Send the normalised, zero-padded state."
            )
        return checked("state", state, (rows, self.pi.max_state_dim))


def cost(args: PI0Args) -> PiCost:
    """Return what a checkpoint costs by its sizes."""
    return PiCost("pi0", args, PI0Request)
