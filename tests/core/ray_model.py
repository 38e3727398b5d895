"""Source of the adapter that Ray tests install as a distribution: it does what its prompt says.

The result of an Observation is [way, pid]: the sum of the session's moves, and who computed it.
"""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from phyai.adapter import Adapter, AdapterArgs, observations
from phyai.errors import CheckpointError
from phyai.sessions import session_rows
from phyai.solver import Direct
from phyai.types import BufferSpec, Key, Prepared


@dataclass
class Args(AdapterArgs):
    """load_s: how long loading takes.  fail: whether it fails."""

    max_batch_size: int = 4
    load_s: float = 0.0
    fail: bool = False


class Model(Adapter):
    """See the module."""

    name = "obedient"
    args_cls = Args

    def load(self) -> Any:
        args: Any = self.args
        self.services.progress(1, 2, "weights")
        time.sleep(args.load_s)
        if args.fail:
            raise CheckpointError("checkpoint must be there; got nothing. Bring one.")
        return super().load()

    def prepare(self, request: Any) -> Prepared:
        rows = observations(request, max_rows=self.args.max_batch_size)  # type: ignore[attr-defined]
        for row in rows:
            obey(row.prompt or "")
        ids, seqs = session_rows(rows)
        moves = torch.tensor([[row.state[0], 0.0] for row in rows], dtype=torch.float32)
        start = torch.zeros(len(rows), 1, 2)
        return Prepared({"move": moves, "noise.action": start}, len(rows), Key(), rows, ids, seqs)

    def denoiser(self) -> Way:
        return Way()

    def solver(self) -> Direct:
        return Direct()

    def cache(self) -> Any:
        return lambda key: {"way": BufferSpec((2,), torch.float32, session=True, scratch=True)}


def obey(prompt: str) -> None:
    """Do what a prompt says: ``sleep S``, ``gil S``, ``exit CODE``, ``raise TEXT``."""
    word, _, rest = prompt.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "gil":
        ctypes.PyDLL(None).usleep(int(1e6 * float(rest)))  # a PyDLL keeps the GIL
    elif word == "exit":
        print("a last word", file=__import__("sys").stderr, flush=True)
        os._exit(int(rest))
    elif word == "raise":
        raise KeyError(rest)


class Way:
    """Adds the move to the session's row; the second value is this process's id."""

    prediction = "clean"

    def __call__(self, x: Any, step: Any, cache: Any) -> dict[str, torch.Tensor]:
        way = cache["way"].add_(cache.inputs["move"])
        way[:, 1] = os.getpid()
        return {"action": way[:, None].clone()}
