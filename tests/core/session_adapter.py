"""An adapter with sessions in 30 lines: adds up the moves a robot reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import Adapter, AdapterArgs, observations
from phyai.errors import RequestError
from phyai.sessions import session_rows
from phyai.solver import Direct
from phyai.types import ActionChunk, BufferSpec, Key, Observation, Prepared

DIM = 2


@dataclass
class OdometerArgs(AdapterArgs):
    max_batch_size: int = 4


class Odometer(Adapter):
    """Result [1, 2]: the sum of all states of the session, this one's included."""

    name = "odometer"
    args_cls = OdometerArgs
    prepared = 0

    def prepare(self, request: Any) -> Prepared:
        self.prepared += 1  # how often, for the tests
        if isinstance(request, MoveRequest):
            return request.prepared()
        rows = observations(request, max_rows=self.args.max_batch_size)  # type: ignore[attr-defined]
        ids, seqs = session_rows(rows)
        moves = torch.tensor([row.state for row in rows], dtype=torch.float32)
        if moves.shape[1:] != (DIM,):
            raise RequestError(f"state must have {DIM} values; got {list(moves.shape[1:])}.")
        key = Key(buckets=(("words", len(rows[0].prompt or "")),))
        return _prepared(moves, key, rows, ids, seqs)

    def denoiser(self) -> Way:
        return Way()

    def solver(self) -> Direct:
        return Direct()

    def cache(self) -> Any:
        return lambda key: self.buffers()

    def buffers(self) -> Mapping[str, BufferSpec]:
        return {"way": BufferSpec((DIM,), torch.float32, session=True, scratch=True)}


class Way:
    """Adds the move to the session's row, in place."""

    prediction = "clean"

    def __call__(self, x: Any, step: Any, cache: Any) -> dict[str, Tensor]:
        return {"action": cache["way"].add_(cache.inputs["move"])[:, None].clone()}


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class MoveRequest:
    """Model request: moves [B, 2], the session and seq of each row."""

    moves: Tensor
    session_ids: tuple[Any, ...] | None = None
    seqs: tuple[Any, ...] | None = None

    def prepared(self) -> Prepared:
        return _prepared(self.moves, Key(), None, self.session_ids, self.seqs)


def _prepared(moves: Tensor, key: Key, meta: Any, ids: Any, seqs: Any) -> Prepared:
    start = torch.zeros(len(moves), 1, DIM)
    return Prepared({"move": moves, "noise.action": start}, len(moves), key, meta, ids, seqs)


def frame(
    session: str | None, seq: int | None, move: float = 1.0, prompt: str | None = None
) -> Observation:
    """Return the observation of a session; a move of ``move`` forward and 10 * ``move`` aside."""
    named = {} if session is None else {"session_id": session, "seq": seq}
    return Observation(state=[move, 10.0 * move], prompt=prompt, options=named)


# ---------------------------------------------------------------- results


def way(result: Any) -> float:
    """Return the first value of a result, and check that the second is ten times it."""
    (values,) = (
        result.actions.tolist() if isinstance(result, ActionChunk) else result[:, 0].tolist()
    )
    assert values[1] == 10 * values[0]
    return float(values[0])


def counts(engine: Any) -> dict[str, int]:
    """Return what an engine says about its sessions."""
    (replica,) = engine.stats()["replicas"]
    return dict(replica["sessions"])
