"""LocalPool: replicas in processes of this machine.

CPU replicas are forks of one loader, which holds the weights once for all of them. Other replicas,
and those of plugins that start threads while they load, are fresh processes that load side by side.
A replica of several ranks is a fresh process per rank: rank 0 takes its requests, and the end of
any of them is the end of all.
One thread of the engine's process, the supervisor, starts, hears and ends them all.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from phyai.deployment.answers import Listening
from phyai.deployment.channel import ChannelClosed, Message
from phyai.deployment.dispatch import Call, Replica
from phyai.deployment.forks import forget_in_forks
from phyai.deployment.lifeline import Lifeline
from phyai.deployment.local_hearing import Hearing
from phyai.deployment.local_starts import Starts, told
from phyai.deployment.members import Follower, Loader, Member, Worker, how_ranks_ended, team
from phyai.deployment.messages import WATCHED_STEP
from phyai.deployment.pool import TICK_S, PoolSpec, ReplicaPool
from phyai.deployment.rank_weights import RankWeights
from phyai.deployment.supervisor import WRITE, Supervisor
from phyai.deployment.values import encode
from phyai.deployment.weight_switch import WeightSwitch
from phyai.errors import EngineUnavailableError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("phyai")

STATUS_S = 1.0
"""How long to wait for the exit status of a worker whose connection has ended."""
LATE_S = 0.5
"""Longer than this nothing was heard only because of us: a slow callback, a stopped process."""
KILL_S = 4.0
"""How long the kernel may take to end what was killed."""


class LocalPool(ReplicaPool):
    """Workers on this machine; see the module. Needs Linux.

    >>> from phyai.deployment.local_pool import LocalPool
    >>> LocalPool.__mro__[1].__name__
    'ReplicaPool'
    """

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec)
        self.ranked = any(len(names) > 1 for names in spec.devices)
        # Ranks hold different parts of the model.
        self.forking = all(names == ("cpu",) for names in spec.devices)
        self.loader: Loader | None = None
        self.members: set[Member] = set()  # every process that may still be there
        self.supervisor = Supervisor(self._tick)
        self.lifeline = Lifeline()
        self.starts, self.hearing, self.listening = Starts(self), Hearing(self), Listening(self)
        self._looked_at = time.monotonic()
        self.updated = False  # the checkpoint no longer says what the weights are
        self.rank_weights = RankWeights(self)
        self._held: list[tuple[Replica, Call]] | None = None  # while sessions move
        self._at_exit = _closer(weakref.ref(self))
        forget_in_forks(self)

    # ------------------------------------------------------------ ReplicaPool

    def on_own_thread(self) -> bool:
        return self.supervisor.here()

    def _open(self) -> None:
        atexit.register(self._at_exit)
        self.supervisor.start()

    def _launch(self, replica: Replica) -> None:
        self.supervisor.soon(partial(self.guarded, replica, self._launch_now))

    def _send(self, replica: Replica, call: Call) -> None:
        with self.dispatch.lock:
            if self._held is not None and (call.sessions or call.kind != "step"):
                self._held.append((replica, call))
                return
        self.send_to(call.carrier, call)

    def _kill(self, replica: Replica, why: str) -> None:
        for member in list(self.members):
            if isinstance(member, Worker) and member.replica is replica:
                if member.trial or member.retired:
                    continue
                if member.gone_at is None and not member.leaving:
                    member.kill(why)
                    if member.handle is None and member.loader is not None:
                        member.loader.kill(why)  # it was asked for a fork, and does not answer
        loader = self.loader
        if loader is not None and any(w.replica is replica for w in loader.waiting):
            loader.kill(why)

    def _end(self) -> None:
        atexit.unregister(self._at_exit)
        patience = self.limits.shutdown_timeout_s if self._start and self._start.done else 0.0
        deadline = time.monotonic() + patience
        for member in list(self.members):
            self._say_exit(member)
        while self.members and not self.on_own_thread() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.lifeline.cut()
        for member in list(self.members):
            member.kill("a worker of an engine that was closed.")
        deadline = time.monotonic() + KILL_S
        while self.members and not self.on_own_thread() and time.monotonic() < deadline:
            time.sleep(0.005)
        self.supervisor.stop()
        for member in list(self.members):  # the supervisor itself closed us, or it hangs
            self._reap(member)
        if left := [m.handle.pid for m in self.members if m.handle and not m.handle.ended()]:
            log.error("processes %s of a closed engine do not end", left)
        self.members.clear()

    def forget(self) -> None:
        """Be closed in a fork of the engine's process, and have nothing of its processes there."""
        atexit.unregister(self._at_exit)
        self.dispatch.abandon()
        self._closing, self._updating, self._ended = threading.Lock(), threading.Lock(), True
        self.supervisor.abandon()
        self.lifeline.cut()  # the engine's process has the end that counts
        for member in list(self.members):
            with contextlib.suppress(OSError):
                member.forget()
        self.members.clear()

    def _update(self, items: Iterable[tuple[str, Tensor]]) -> None:
        if self.ranked:
            self.rank_weights.update(items)
        else:
            WeightSwitch(self).run(items)

    # ------------------------------------------------------------ starting, on the supervisor

    def guarded(self, replica: Replica, job: Callable[[Replica], object]) -> None:
        """Start something for a replica; what keeps it from starting is how it died."""
        try:
            job(replica)
        except Exception as error:
            self._died(replica, None, "a worker that cannot be started.", told(error))

    def _launch_now(self, replica: Replica) -> None:
        if self.dispatch.closed:
            return
        if self.ranked:
            self.starts.ranks(replica)
            return
        if self.updated and (self.loader is None or not self.forking):
            raise EngineUnavailableError(
                "replica must be started with the weights of the last update; got no process that "
                "has them any more. Create a new Engine.",
                reason="worker_died",
            )
        if not self.forking:
            self.starts.worker(replica)
            return
        if self.loader is None:
            self.loader = self.starts.loader()
        self.starts.fork(self.loader, replica)

    def join(self, member: Member) -> None:
        """Hear what a process says from now on."""
        member.stderr.passed_on()
        self.members.add(member)
        self.supervisor.watch(member.channel, partial(self._on_channel, member))
        self.supervisor.watch(member.stderr, partial(self._on_stderr, member))

    # ------------------------------------------------------------ hearing, on the supervisor

    def _on_stderr(self, member: Member, events: int) -> None:
        if not member.stderr.feed():
            self.supervisor.forget(member.stderr)

    def _on_channel(self, member: Member, events: int) -> None:
        try:
            if events & WRITE and member.channel.flush():
                self.supervisor.want_writing(member.channel, False)
            while (message := self._received(member)) is not None:
                self.heard_from(member, message)
        except ChannelClosed:
            self._gone(member)
        except Exception as error:
            self.not_understood(member, error)

    def _received(self, member: Member) -> Message | None:
        """Return the next message; None when there is none for us: a caller may listen itself."""
        if not member.listening.acquire(blocking=False):
            return None
        try:
            return member.channel.receive()
        finally:
            member.listening.release()

    def heard_from(self, member: Member, message: Message) -> None:
        """Act on a message; an answer also on the thread that waits for it."""
        try:
            self.hearing.take(member, message)
        except Exception as error:
            self.supervisor.soon(partial(self.not_understood, member, error))

    def not_understood(self, member: Member, error: Exception) -> None:
        """A worker nobody can understand is no worker."""
        log.error("a worker sends what nobody understands; it is ended", exc_info=error)
        member.kill(f"a worker whose messages cannot be read ({error}), so it was killed.")
        self._gone(member)

    # ------------------------------------------------------------ ending, on the supervisor

    def _tick(self) -> float:
        now = time.monotonic()
        if (late := now - self._looked_at - TICK_S) > LATE_S:
            self.dispatch.excuse(late)
        self._looked_at = now
        wait = self.tick()
        for member in list(self.members):
            if member.gone_at is not None and self._buriable(member):
                self._bury(member)
            elif member.leaving_at is not None:
                if time.monotonic() - member.leaving_at > self.limits.shutdown_timeout_s:
                    member.kill()
            elif isinstance(member, Worker) and member.retired:
                self._let_finish(member)
        if any(member.gone_at is not None for member in self.members):
            return 0.01
        return min(wait, TICK_S)

    def _let_finish(self, worker: Worker) -> None:
        """End a replaced worker when it has answered everything, or is stuck."""
        with self.dispatch.lock:
            calls = [c for c in worker.replica.calls.values() if c.carrier is worker]
        if not calls:
            self._say_exit(worker)
            return
        limit = self.limits.request_timeout_s
        if limit is not None and time.monotonic() - calls[0].sent_at > limit:
            worker.kill("a worker that was stuck after it had been replaced, so it was killed.")

    def _gone(self, member: Member) -> None:
        """Its connection ended: whatever is left of it is killed, and it is buried soon."""
        if member.gone_at is None:
            member.gone_at = time.monotonic()
            self.supervisor.hurry()
            self.supervisor.forget(member.channel)
            if member.killed_why is None and member.leaving:
                return
            if member.handle is not None:
                member.handle.kill()
            for other in team(member):
                other.sweep()

    def _buriable(self, member: Member) -> bool:
        assert member.gone_at is not None
        if isinstance(member, Worker) and any(f in self.members for f in member.followers):
            return False
        waited = time.monotonic() - member.gone_at > STATUS_S
        if member.handle is None:
            return waited
        known = member.status_known()
        return member.handle.ended() and (known or waited or member.leaving)

    def _bury(self, member: Member) -> None:
        why = member.why()
        self._reap(member)
        if isinstance(member, Loader):
            self._loader_died(member, why)
        elif isinstance(member, Follower):
            member.lead.buried.append((member.rank, why, member))
        elif isinstance(member, Worker) and (member.retired or member.trial):
            self._lost_calls(member.replica, member, why)
        elif isinstance(member, Worker) and member.followers:
            self._died(member.replica, member, *how_ranks_ended(member, why))
        elif isinstance(member, Worker):
            self._died(member.replica, member, why, member.error)

    def _reap(self, member: Member) -> None:
        self.supervisor.forget(member.channel)
        self.supervisor.forget(member.stderr)
        member.status_known()
        self.members.discard(member)
        member.release()

    def _loader_died(self, loader: Loader, why: str) -> None:
        """Workers go on; those it was to fork never come."""
        why = why.replace("a worker", "a loader", 1)
        waiting = loader.waiting
        waiting += [
            m
            for m in self.members
            if isinstance(m, Worker) and m.handle is None and m.loader is loader
        ]
        if loader is self.loader:
            self.loader = None
            if not loader.leaving and loader.error is None:
                log.warning("the loader of the replicas is gone: %s", why)
        for worker in waiting:
            self._reap(worker)
            worker.error = worker.error or loader.error
            if not worker.trial:
                self._died(worker.replica, worker, why, loader.error)

    # ------------------------------------------------------------ messages

    def post(self, member: Member, kind: str, value: Any, *, fds: tuple[int, ...] = ()) -> None:
        """Send a message without an answer; a dead process gets none."""
        body, buffers = encode(value)
        with contextlib.suppress(ChannelClosed):
            if not member.channel.send(kind, 0, body, buffers, fds=fds):
                self.flush_later(member)

    def send_to(self, worker: Worker, call: Call) -> None:
        """Send a call to a worker. Raises: RequestError for what cannot travel."""
        body, buffers = call.packed or encode(call.payload, where="request")
        if call.retries_left:  # its arrays are the caller's, who may write to them meanwhile
            call.packed = body, [memoryview(bytes(buffer)) for buffer in buffers]
        call.future.listen = partial(self.listening.wait, worker, call.id)
        call.future.stop = partial(self.post, worker, "cancel", call.id)
        try:
            kind = WATCHED_STEP if call.watch.listens else call.kind
            if not worker.channel.send(kind, call.id, body, buffers):
                self.flush_later(worker)
            if call.watch.stop_asked:  # maybe before the worker knew of it
                self.post(worker, "cancel", call.id)
        except ChannelClosed:  # its burial fails the call, unless it was buried a moment ago
            if worker not in self.members:
                raise EngineUnavailableError(
                    f"replica {worker.replica.id} must live to answer; got a worker that has just "
                    "died. The request may be sent again.",
                    reason="worker_died",
                ) from None

    def flush_later(self, member: Member) -> None:
        self.supervisor.soon(partial(self.supervisor.want_writing, member.channel, True))

    def _say_exit(self, member: Member) -> None:
        member.leaving_at = member.leaving_at or time.monotonic()
        self.post(member, "exit", None)

    def let_go(self, member: Member) -> None:
        """Have a process end in its own time."""
        self._say_exit(member)

    # ------------------------------------------------------------ new weights

    def workers_of(self, replica: Replica) -> list[Worker]:
        """Return every process of a replica that is there."""
        found = (m for m in self.members if isinstance(m, Worker) and m.replica is replica)
        return [worker for worker in found if not worker.leaving]

    def retire(self, worker: Worker) -> None:
        """Let a worker finish what it has, and end; one that is not ready yet ends at once."""
        worker.retired = True
        if not worker.ready:
            worker.leaving_at = time.monotonic()
            worker.kill("a worker that was replaced.")

    def switched(self, replica: Replica, worker: Worker) -> None:
        """A replica is served by another worker from now on."""
        self._ready(replica, worker, worker.info, worker.described)

    def hold_sessions(self) -> None:
        """Keep back calls that name sessions, until ``release_sessions``."""
        with self.dispatch.lock:
            self._held = []

    def sessions_run(self, replica: Replica) -> bool:
        """Return whether a call that names a session is on its way to a worker, or runs there."""
        with self.dispatch.lock:
            held = {call.id for _, call in self._held or ()}
            calls = [call for call in replica.calls.values() if call.carrier is replica.carrier]
            return any(call.sessions and call.id not in held for call in calls)

    def release_sessions(self) -> None:
        """Send what was kept back, to the workers that have the sessions now."""
        with self.dispatch.lock:  # all along: a session's next call must not overtake these
            held, self._held = self._held or [], None
            for replica, call in held:
                if call.id in replica.calls:  # it has not failed with a worker that died
                    call.carrier = replica.carrier
                    self._send_or_fail(replica, call)


def _closer(pool: weakref.ref[LocalPool]) -> Callable[[], None]:
    def close() -> None:
        if (found := pool()) is not None:
            found.close()

    return close
