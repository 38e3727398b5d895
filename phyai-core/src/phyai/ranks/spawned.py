"""Ranks that a pool started: where they meet, and how one of them joins the others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from phyai.core_setup import mesh_of
from phyai.engine_config import EngineConfig, resolve_device
from phyai.parallel import ParallelService

IDLE_S = 365 * 24 * 3600.0
"""How long ranks wait for something to do; whoever they wait for dies before that."""
LOOPBACK = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class RankOrder:
    """Which rank of its replica a process is.

    store: descriptor of the file in which the ranks meet.  output_rank: whose results count.
    """

    rank: int
    store: int
    output_rank: int


class MeetingPlace:
    """A file in memory, in which ranks leave their addresses; nobody else sees it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("phyai-ranks")

    def close(self) -> None:
        """Give our copy back; the ranks have theirs."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = -1


def loopback(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of ranks on one machine: they talk over its loopback."""
    return {name: "lo" for name in LOOPBACK if not variables.get(name)}


def join_spawned(config: EngineConfig, order: RankOrder) -> ParallelService:
    """Join the other ranks of this replica. Raises: CommTimeoutError for ranks that do not come."""
    mesh = mesh_of(config.parallel)
    device = resolve_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ParallelService.start(
        mesh,
        order.rank,
        device,
        store=FileStore(f"/proc/self/fd/{order.store}", mesh.world),
        timeout_s=config.parallel.timeout_s,
        control_timeout_s=IDLE_S,
        # Processes start when the machine lets them; one that died ends its replica before that.
        meet_timeout_s=config.runtime.dist_timeout_s,
    )
