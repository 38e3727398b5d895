"""A correct policy with sessions: its rows hold the last four states and how many there were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.adapter import Adapter, AdapterArgs, observations
from phyai.cache import Cache
from phyai.errors import RequestError
from phyai.sessions import session_rows
from phyai.solver import Direct
from phyai.types import BufferSpec, Key, Prepared

STATE, KEPT, HORIZON = 3, 4, 2
OPTIONS = ("session_id", "seq")


@dataclass
class SessionArgs(AdapterArgs):
    max_batch_size: int = 1


class Network:
    """Waypoints from the mean of the states that are there, and the number of frames."""

    prediction = "clean"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weight = torch.randn(STATE, HORIZON * STATE, generator=generator)

    def __call__(self, x: Any, step: Any, cache: Cache) -> dict[str, Tensor]:
        frames = cache["frames"]
        mean = cache["trail"].sum(dim=1) / frames.clamp(max=KEPT)
        out = mean @ self.weight + 0.1 * frames
        return {"action": out.view(-1, HORIZON, STATE)}


class Trail:
    """Appends the state to the session's row, in place."""

    def encode(self, cache: Cache) -> None:
        trail = cache["trail"]
        trail.copy_(torch.cat([trail[:, 1:], cache.inputs["state"][:, None]], dim=1))
        cache["frames"].add_(1.0)


class SessionPolicy(Adapter):
    name = "toy_session"
    args_cls = SessionArgs

    def load(self) -> None:
        self.network = Network()

    def prepare(self, request: Any) -> Prepared:
        rows = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        ids, seqs = session_rows(rows)
        states = torch.stack([self._state(row.state) for row in rows])
        start = torch.zeros(len(rows), HORIZON, STATE)
        tensors = {"state": states, "noise.action": start}
        return Prepared(tensors, len(rows), Key(), meta=rows, session_ids=ids, seqs=seqs)

    def _state(self, state: Any) -> Tensor:
        if not isinstance(state, np.ndarray) or state.shape != (STATE,):
            raise RequestError(f"state must be an array of {STATE} values; got {state!r}.")
        if not np.isfinite(state).all():
            raise RequestError("state must be finite; got NaN or infinity.")
        return torch.from_numpy(state.astype(np.float32))

    def denoiser(self) -> Network:
        return self.network

    def conditioning(self) -> Trail:
        return Trail()

    def solver(self) -> Direct:
        return Direct()

    def cache(self) -> Any:
        return self._buffers

    def _buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        return {
            "trail": BufferSpec((KEPT, STATE), torch.float32, session=True),
            "frames": BufferSpec((1,), torch.float32, session=True),
        }
