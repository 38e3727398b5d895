"""New weights for replicas of several ranks: in place, in all of them or in none.

Ranks cannot be forked, so a copy with the new weights cannot be made beside them. Every rank looks
at all names and shapes before it changes anything, between two requests. The pool keeps what was
updated: a replica that is started again reads the checkpoint, and then takes that over, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from phyai.deployment.calls import Call, Replica
from phyai.deployment.members import Worker
from phyai.errors import WeightUpdateError
from phyai.weights import check_given

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.deployment.local_pool import LocalPool

log = logging.getLogger("phyai")


class RankWeights:
    """What was updated in a pool whose replicas have several ranks."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.kept: dict[str, Tensor] = {}

    def update(self, items: Iterable[tuple[str, Tensor]]) -> None:
        """Give all replicas new weights.

        Raises: WeightUpdateError; then every replica has the weights it had, some after a restart.
        """
        pool, before = self.pool, self.kept
        given = _copies(items)
        if pool.on_own_thread():
            raise WeightUpdateError(
                "weights must be updated on a thread that may wait; got the callback of a Future. "
                "Hand it to another thread."
            )
        with pool.dispatch.lock:
            ready = [(r, r.carrier) for r in pool.dispatch.replicas if r.state == "ready"]
            wanted = self.kept = {**before, **given}  # what starts from now on takes them over
        calls = [(worker, self._send(replica, worker, given)) for replica, worker in ready]
        errors = [(worker, call.future.exception()) for worker, call in calls]
        refused = [e for _, e in errors if isinstance(e, WeightUpdateError)]
        with pool.dispatch.lock:
            for worker, error in errors:
                if error is None:
                    worker.weights = wanted
            if any(error is None for _, error in errors) and not refused:
                return  # whoever died meanwhile starts again with the new ones
            self.kept = before
        pool.supervisor.soon(partial(self._take_back, wanted))
        if refused:
            raise refused[0]
        error = errors[0][1] if errors else pool.dispatch.unavailable()
        raise WeightUpdateError(
            f"weights must reach a replica; got {type(error).__name__}: {error} The old ones stay "
            "in use."
        ) from error

    def renew(self, worker: Worker) -> None:
        """Let rank 0 of a replica that has started take requests, with the weights of updates."""
        with self.pool.dispatch.lock:  # an update reaches it from here on, or is taken over below
            weights = self.kept
            if not weights:
                worker.weights = weights
                self.pool.switched(worker.replica, worker)
                return
        call = self._send(worker.replica, worker, weights)
        call.future.add_done_callback(
            lambda future: self.pool.supervisor.soon(
                partial(self._renewed, worker, weights, future)
            )
        )

    def _renewed(self, worker: Worker, weights: dict[str, Tensor], future: Future[Any]) -> None:
        error = future.exception()
        with self.pool.dispatch.lock:
            if error is None and weights is self.kept:
                worker.weights = weights
                self.pool.switched(worker.replica, worker)
                return
        if error is None and weights.keys() <= self.kept.keys():  # there was another update
            self.renew(worker)
        else:
            told = "they were taken back" if error is None else f"{type(error).__name__}: {error}"
            worker.kill(
                f"a worker that does not have the weights of the last update ({told}), so it was "
                "killed."
            )

    def _take_back(self, weights: dict[str, Tensor]) -> None:
        """End the workers that took over what others refused, also those that started with it."""
        for member in list(self.pool.members):
            if isinstance(member, Worker) and member.weights is weights and not member.leaving:
                member.kill("a worker with weights that another replica refused, so it was killed.")

    def _send(self, replica: Replica, worker: Worker, weights: dict[str, Tensor]) -> Call:
        call = Call("update_weights", weights)
        self.pool.dispatch.begin(replica, call)
        call.carrier = worker
        try:
            self.pool.send_to(worker, call)
        except Exception as error:
            if self.pool.dispatch.settle(replica, call.id) is not None:
                call.fail(error)
        return call


def _copies(items: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return host copies, which the caller cannot change any more."""
    try:
        given = dict(items)
        return {n: check_given(n, tensor).detach().cpu().clone() for n, tensor in given.items()}
    except WeightUpdateError:
        raise
    except Exception as error:
        raise WeightUpdateError(
            f"weights must be names with tensors; got {type(error).__name__}: {error}. Send a "
            "mapping or pairs; the old ones stay in use."
        ) from error
