"""The services an adapter works with: one explicit object, no globals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from phyai.graph import GraphService
from phyai.kernels import KernelTable
from phyai.memo import Memo
from phyai.memory import Arena
from phyai.parallel import ParallelService
from phyai.timers import Profile

Progress = Callable[[int, int, str], None]
"""progress(done_bytes, total_bytes, name)."""


def no_progress(done: int, total: int, name: str) -> None:
    return None


@dataclass(frozen=True)
class Services:
    """graphs, kernels, memory and profile of one rank, and where its tensors live."""

    graphs: GraphService
    kernels: KernelTable
    memory: Arena
    profile: Profile
    device: torch.device
    dtype: torch.dtype
    progress: Progress = no_progress
    parallel: ParallelService = field(default_factory=ParallelService.single)
    memo: Memo = field(default_factory=Memo)
