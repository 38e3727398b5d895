"""An adapter of several ranks whose steps do what a replica must survive, or must not.

``installed`` puts it, as a distribution, where this process and every one it spawns find it. An
observation's prompt says what to do, its state with which number; the answer is one number.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phyai.testing.sandbox import Sandbox
from phyai.types import Observation

PLUGIN_ID = "ranked"
MANIFEST = ", capabilities={'parallel': ['cfg', 'tp']}"

MODEL = """
import os, signal, sys, time
from dataclasses import dataclass

import numpy as np
import torch

from phyai.adapter import Adapter, AdapterArgs, observations
from phyai.errors import RequestError, WeightUpdateError
from phyai.solver import Direct
from phyai.types import ActionChunk, Key, Prepared


@dataclass
class Args(AdapterArgs):
    checkpoint_dir: str | None = None
    max_batch_size: int = 4
    fail_rank: int = -1          # loading fails there


class Model(Adapter):
    name = "ranked"
    args_cls = Args
    parallel = frozenset({"tp", "cfg"})

    def load(self):
        self.rank = self.services.parallel.rank
        if self.rank == self.args.fail_rank:
            raise RequestError(f"loading went wrong on rank {self.rank}")
        self.scale = torch.ones(1)
        self.prepared = 0

    def update_weights(self, items):
        items = dict(items)
        if set(items) - {"scale"}:
            raise WeightUpdateError(f"unknown names {sorted(items)}")
        if float(items["scale"]) == 13 and self.rank == 1:
            os._exit(13)
        if float(items["scale"]) == 14 and self.rank == 1:
            raise WeightUpdateError("no room on rank 1")
        if float(items["scale"]) == 16:
            raise SystemExit(16)
        if float(items["scale"]) == 15:  # one replica refuses, whichever comes first
            first = torch.zeros(1)
            if self.rank == 0 and not os.path.exists(marker := self.args.checkpoint_dir):
                os.close(os.open(marker, os.O_CREAT))
                first += 1
            if float(self.services.parallel.tp.all_reduce(first)):
                raise WeightUpdateError("this replica has no room")
        self.scale.copy_(items["scale"])

    def prepare(self, request):
        self.prepared += 1
        if isinstance(request, torch.Tensor):
            return Prepared({"noise.action": request[:, None]}, len(request), Key())
        rows = observations(request, max_rows=self.args.max_batch_size)
        if rows[0].prompt == "quit early":
            raise SystemExit(4)
        if rows[0].prompt == "bad":
            raise RequestError("prompt must be good; got 'bad'. Be good.")
        start = torch.zeros(len(rows), 1, 1)
        state = torch.tensor([float(row.state[0]) for row in rows])
        key = Key(extra=(("do", rows[0].prompt),))
        meta = tuple(object() if row.prompt == "stays" else row.prompt for row in rows)
        return Prepared({"noise.action": start, "state": state}, len(rows), key, meta)

    def denoiser(self):
        return Network(self)

    def solver(self):
        return Direct()

    def output(self):
        return Out(self)


class Network:
    prediction = "clean"

    def __init__(self, model):
        self.model = model

    def __call__(self, x, step, cache):
        do = dict(cache.key.extra).get("do", "")
        state = cache.inputs.tensors.get("state")
        if state is None:
            return {"action": self.model.scale * x["action"]}
        rank, tp, value = self.model.rank, self.model.services.parallel.tp, float(state[0])
        if do == "raise":
            raise ValueError(f"no such thing as {value}")
        if do == "quit":
            raise SystemExit(3)
        if do == "no room":
            raise MemoryError("out of it")
        if rank == value:
            if do == "raise on":
                raise ValueError(f"rank {rank} cannot")
            if do == "raise late on":
                tp.all_reduce(torch.ones(1))
                raise ValueError(f"rank {rank} cannot")
            if do == "sleep on":
                time.sleep(1e6)
            if do == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if do == "exit":
                print("last words", file=sys.stderr, flush=True)
                os._exit(5)
        if do == "pause":
            time.sleep(value)
        total = tp.all_reduce((rank + 1) * self.model.scale * state)
        if do == "late":
            raise ValueError("after it")
        return {"action": total[:, None, None].clone()}


class Out:
    def __init__(self, model):
        self.model = model

    def decode(self, x, cache, prepared):
        rows = x["action"].double().numpy()
        if prepared.meta[0] == "rank":
            rows = np.full_like(rows, self.model.rank)
        return [
            ActionChunk(row.astype(np.float64), ("a",), np.ones(len(row), bool), row.copy())
            for row in rows
        ]

    def tensors(self, x, cache, prepared):
        return x["action"]
"""


@contextmanager
def installed(folder: Path) -> Iterator[Any]:
    """Give the class of its arguments, while the distribution can be found."""
    sandbox = Sandbox(folder / "site")
    sandbox.adapter(PLUGIN_ID, model=MODEL, more=MANIFEST)
    with sandbox.visible():
        yield importlib.import_module(f"{PLUGIN_ID}_dist.model").Args


def ask(do: str, value: float = 0.0, **options: Any) -> Observation:
    """Return an Observation that has the adapter do something."""
    return Observation(state=[value], prompt=do, options=options)


def number(result: Any) -> float:
    return float(result.actions.reshape(-1)[0])
