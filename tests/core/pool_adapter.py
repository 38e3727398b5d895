"""An adapter whose steps do what a pool must survive, as an installed distribution.

``installed`` puts it where this process and every one it spawns find it. An observation's prompt
says what to do, its state with which number; the answer is one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phyai.testing.sandbox import Sandbox
from phyai.types import Observation

PLUGIN_ID = "antics"

MODEL = """
import ctypes, os, signal, sys, threading, time
from dataclasses import dataclass

import numpy as np
import torch

from phyai.adapter import Adapter, AdapterArgs, observations
from phyai.errors import RequestError
from phyai.kernels import onednn
from phyai.session_options import session_rows
from phyai.solver import Direct
from phyai.types import ActionChunk, BufferSpec, Key, Prepared


@dataclass
class Args(AdapterArgs):
    checkpoint_dir: str | None = None
    max_batch_size: int = 4
    load_s: float = 0.0
    fail: str | None = None      # what loading does: raise, exit, kill
    thread: bool = False         # whether loading starts one
    weight_mb: int = 0
    kept: bool = False           # whether there are sessions
    function: object = None
    marker: str | None = None    # a file; loading fails once it is there


class Model(Adapter):
    name = "antics"
    args_cls = Args

    def load(self):
        args = self.args
        for tenth in range(10):
            self.services.progress(tenth, 10, "weights")
            time.sleep(args.load_s / 10)
        if args.thread:
            threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
        if args.marker and os.path.exists(args.marker):
            raise RuntimeError("the checkpoint is gone")
        if args.fail == "raise":
            raise RequestError("loading went wrong")
        if args.fail == "exit":
            os._exit(7)
        if args.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        self.scale = torch.ones(1)
        layer = torch.eye(1024)  # 4 MiB, kept in the layout of oneDNN alone
        self.weights = [onednn.pack(layer * 1.0) for _ in range(args.weight_mb // 4)]

    def update_weights(self, items):
        items = dict(items)
        for name, tensor in items.items():
            if name != "scale":
                raise KeyError(name)
            if float(tensor) < 0:
                raise ValueError("scale must be positive")
            if float(tensor) == 13:
                os._exit(13)
            self.scale.copy_(tensor)

    def expects(self):
        return {"state_dim": 1, "prompt": True}

    def prepare(self, request):
        if isinstance(request, torch.Tensor):
            return Prepared({"noise.action": request[:, None]}, len(request), Key())
        rows = observations(request, max_rows=self.args.max_batch_size)
        ids, seqs = session_rows(rows)
        start = torch.zeros(len(rows), 1, 1)
        state = torch.tensor([float(row.state[0]) for row in rows])
        key = Key(extra=(("do", tuple(row.prompt for row in rows)),))
        meta = tuple(row.prompt for row in rows)
        return Prepared({"noise.action": start, "state": state}, len(rows), key, meta, ids, seqs)

    def cache(self):
        kept = {"sum": BufferSpec((1,), torch.float32, session=True, scratch=True)}
        return lambda key: kept if self.args.kept else {}

    def denoiser(self):
        return Network(self)

    def solver(self):
        return Direct()

    def output(self):
        return Out()


class Network:
    prediction = "clean"

    def __init__(self, model):
        self.model = model

    def __call__(self, x, step, cache):
        do = dict(cache.key.extra).get("do", ("",))[0] or ""
        state = cache.inputs.tensors.get("state")
        if state is None:
            return {"action": self.model.scale * x["action"]}
        value = float(state[0])
        if do == "sleep":
            time.sleep(value)
        elif do == "hold":  # the interpreter lock, in C
            ctypes.PyDLL(None).usleep(int(1e6 * value))
        elif do == "raise":
            raise ValueError(f"no such thing as {value}")
        elif do == "memory":
            raise MemoryError("out of it")
        elif do == "exit":
            sys.exit(3)
        elif do == "hard exit":
            print("last words", file=sys.stderr, flush=True)
            os._exit(5)
        elif do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif do == "crash":
            ctypes.string_at(0)
        elif do == "read":
            row = torch.ones(1, 1024)
            for weight in self.model.weights:
                row = onednn.linear(row, weight, None)
            value = float(row.sum())
        elif do == "sum":
            return {"action": cache["sum"].add_(state[:, None])[:, None].clone()}
        elif do == "pid":
            value = float(os.getpid())
        elif do == "scale":
            value = float(self.model.scale)
        elif do == "threads":
            value = float(torch.get_num_threads())
        elif do == "random":
            value = float(torch.rand(1, dtype=torch.float64))
        return {"action": torch.full_like(x["action"], value)}


class Out:
    def decode(self, x, cache, prepared):
        rows = x["action"].double().numpy()
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
    import importlib

    sandbox = Sandbox(folder / "site")
    sandbox.adapter(
        PLUGIN_ID,
        model=MODEL,
        more=", capabilities={'sessions': True, 'options': ['session_id', 'seq', 'seed']}",
    )
    with sandbox.visible():
        yield importlib.import_module(f"{PLUGIN_ID}_dist.model").Args


def ask(do: str, value: float = 0.0, **options: Any) -> Observation:
    """Return an Observation that has the adapter do something."""
    return Observation(state=[value], prompt=do, options=options)


def number(result: Any) -> float:
    return float(result.actions.reshape(-1)[0])
