"""New weights for a whole pool: copied first, then switched to, or nothing at all is changed.

A candidate, a fork of the loader, takes the weights over in memory of its own. Workers are forked
of it; sessions move to them when nothing of theirs is running; then every replica switches at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from phyai.deployment.calls import Call, Replica
from phyai.deployment.channel import ChannelClosed
from phyai.deployment.dispatch import closed_pool
from phyai.deployment.members import Loader, Member, Worker
from phyai.deployment.values import encode
from phyai.errors import PhyaiError, WeightUpdateError

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.deployment.local_pool import LocalPool

log = logging.getLogger("phyai")

_POLL_S = 0.005


class WeightSwitch:
    """One update of a local pool, run in its caller's thread."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.limit_s = pool.limits.startup_timeout_s
        self._new: list[Worker] = []
        self._candidate: Loader | None = None
        self._undone = False

    def run(self, items: Iterable[tuple[str, Tensor]]) -> None:
        """Switch to new weights.

        Raises: WeightUpdateError with its cause; then every replica has the weights it had.
        """
        loader = self._loader()
        try:
            given = dict(items) if isinstance(items, Mapping) else dict(iter(items))
            self._candidate = self._on_pool(lambda: self.pool.starts.candidate(loader))
            self._send_weights(self._candidate, given)
            replicas = [r for r in self.pool.dispatch.replicas if r.state != "dead"]
            self._new = [self._forked(replica) for replica in replicas]
            for worker in self._new:
                self._until(lambda w=worker: w.ready, worker, "get ready")  # type: ignore[misc]
            self._switch(loader)
        except BaseException as error:
            self._undo()
            if isinstance(error, WeightUpdateError) or not isinstance(error, Exception):
                raise
            raise WeightUpdateError(
                f"weights must reach every replica; got {type(error).__name__}: {error} The old "
                "ones stay in use."
            ) from error

    # ------------------------------------------------------------ steps

    def _loader(self) -> Loader:
        if not self.pool.forking:
            raise WeightUpdateError(
                "weights of replicas can be updated where they share memory (CPU, and a plugin "
                "that starts no threads while it loads); got replicas that each loaded their own. "
                "Create a new Engine with the new checkpoint."
            )
        loader = self.pool.loader
        gone = loader is None or (loader.handle is not None and loader.handle.ended())
        if loader is None or gone or not loader.loaded:
            raise WeightUpdateError(
                "weights need the loader of the replicas, which keeps what they share; got none, "
                "it has ended. Create a new Engine with the new checkpoint."
            )
        return loader

    def _send_weights(self, candidate: Loader, given: dict[str, Tensor]) -> None:
        self._until(lambda: candidate.loaded, candidate, "start")
        candidate.loaded = False
        body, buffers = encode(list(given.items()), where="weights")
        try:
            if not candidate.channel.send("update", 0, body, buffers):
                self._on_pool(lambda: self.pool.flush_later(candidate))
        except ChannelClosed:
            pass  # noticed below
        self._until(lambda: candidate.loaded, candidate, "take the weights over")

    def _forked(self, replica: Replica) -> Worker:
        candidate = self._candidate
        assert candidate is not None
        worker: Worker = self._on_pool(
            lambda: self.pool.starts.fork(candidate, replica, trial=True)
        )
        return worker

    def _switch(self, loader: Loader) -> None:
        pool = self.pool
        pool.hold_sessions()
        try:
            for worker in self._new:
                if worker.replica.carrier is not None:
                    self._move_sessions(worker)
            self._on_pool(lambda: self._exchange(loader))
        finally:
            pool.release_sessions()

    def _move_sessions(self, new: Worker) -> None:
        old = new.replica.carrier
        self._until(lambda: not self.pool.sessions_run(new.replica), new, "see sessions at rest")
        kept = self._ask(old, "export_sessions", None)
        self._ask(new, "import_sessions", kept)

    def _exchange(self, loader: Loader) -> None:
        """Put the new workers in; on the supervisor's thread, so nothing happens in between."""
        pool = self.pool
        if self._undone:
            raise WeightUpdateError("weights must be wanted; got an update that was given up.")
        for worker in self._new:
            if worker.gone_at is not None or worker not in pool.members:
                raise WeightUpdateError(f"weights must reach every replica; got {worker.why()}")
        with pool.dispatch.lock:
            for worker in self._new:
                replica = worker.replica
                for other in pool.workers_of(replica):
                    if other is not worker:
                        pool.retire(other)
                worker.trial = False
                pool.switched(replica, worker)
            pool.loader, self._candidate = self._candidate, None
            pool.updated = True
        pool.let_go(loader)

    # ------------------------------------------------------------ waiting

    def _ask(self, worker: Worker, kind: str, value: Any) -> Any:
        call = Call(kind, value)
        self.pool.dispatch.begin(worker.replica, call)
        call.carrier = worker
        try:
            self.pool.send_to(worker, call)
            return call.future.result(timeout=self.limit_s)
        finally:
            self.pool.dispatch.settle(worker.replica, call.id)

    def _until(self, reached: Callable[[], bool], member: Member, what: str) -> None:
        deadline = time.monotonic() + self.limit_s
        while not reached():
            if isinstance(member.error, PhyaiError):
                raise member.error
            if member.error is not None or member not in self.pool.members:
                raise WeightUpdateError(
                    f"a process with the new weights must {what}; got {member.why()} The old ones "
                    "stay in use."
                ) from member.error
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    f"a process with the new weights must {what} within startup_timeout_s = "
                    f"{self.limit_s:g} s; got none. The old ones stay in use."
                )
            time.sleep(_POLL_S)

    def _on_pool(self, job: Callable[[], Any]) -> Any:
        """Return what a job gives that only the supervisor's thread may do."""
        call = Call("job", None)

        def run() -> None:
            try:
                call.succeed(job())
            except BaseException as error:
                call.fail(error)

        self.pool.supervisor.soon(run)
        deadline = time.monotonic() + self.limit_s
        while not call.future.done():
            if self.pool.dispatch.closed:  # there may be no supervisor any more
                raise closed_pool()
            if time.monotonic() > deadline:
                raise WeightUpdateError(
                    "weights need the thread that watches the replicas; got one that does not "
                    "answer. Let no callback of a Future wait."
                )
            time.sleep(_POLL_S / 5)
        return call.future.result()

    def _undo(self) -> None:
        self._undone = True
        for member in (*self._new, self._candidate):
            if member is not None and getattr(member, "trial", True):
                member.leaving_at = time.monotonic()
                member.kill("a worker of an update that failed.")
