"""What the processes of a local pool say, and what becomes of it; on the supervisor's thread."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from phyai.deployment.channel import Message
from phyai.deployment.members import Follower, Loader, Member, Worker
from phyai.deployment.processes import ProcessHandle
from phyai.errors import WeightUpdateError

if TYPE_CHECKING:
    from phyai.deployment.local_pool import LocalPool

log = logging.getLogger("phyai")

_CANNOT_UPDATE = (
    "weights of replicas can be updated when a process can be forked with them; got threads that "
    "the plugin started ({}). Create a new Engine with the new checkpoint."
)
DOWNLOADERS = ("tokio", "hf-xet", "hf_xet")
"""Names of threads that a download of the hub leaves behind, and a load from the cache does not."""


class Hearing:
    """Takes messages of loaders and workers."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self._loaded_twice = False

    def take(self, member: Member, message: Message) -> None:
        """Act on a message. Raises: WireError for one that cannot be read."""
        if isinstance(member, Worker):
            self._worker(member, message)
        elif isinstance(member, Loader):
            self._loader(member, message)
        elif isinstance(member, Follower) and message.kind in ("start_error", "broken"):
            member.error = message.error()

    def _worker(self, worker: Worker, message: Message) -> None:
        replica = worker.replica
        match message.kind:
            case "result":
                self.pool._settled(replica, message.call_id, result=message.value)
                message.release()  # nobody may have waited for it any more
            case "failure":
                self.pool._settled(replica, message.call_id, error=message.error())
            case "stepped":
                steps: Any = message.value()
                self.pool._stepped(replica, message.call_id, *steps)
            case "beat":
                info: Any = message.value()
                worker.info = info
                if replica.carrier is worker:
                    self.pool._heard(replica, info)
            case "ready":
                value: Any = message.value()
                worker.info, worker.described = value
                worker.ready = True
                if worker.followers:
                    self.pool.rank_weights.renew(worker)
                elif not worker.trial:
                    self.pool.switched(replica, worker)
            case "progress":
                told: Any = message.value()
                self.pool._progressed(replica, *told)
            case "start_error" | "broken":
                worker.error = message.error()

    def _loader(self, loader: Loader, message: Message) -> None:
        match message.kind:
            case "progress":
                told: Any = message.value()
                self.pool._progressed(None, *told)
            case "loaded" | "updated":
                threads: Any = message.value()
                if threads:
                    self._cannot_fork(loader, threads)
                    return
                loader.loaded = True
                waiting, loader.waiting = loader.waiting, []
                for worker in waiting:
                    self.pool.starts.ask_for(loader, worker)
            case "start_error" | "update_error":
                loader.error = message.error()
            case "forked":
                forked: Any = message.value()
                self._forked(*forked)
            case "threads":
                refused: Any = message.value()
                self._refused(loader, *refused)
            case "ended":
                ended: Any = message.value()
                self._ended_as(*ended)

    def _forked(self, serial: int, pid: int) -> None:
        for member in self.pool.members:
            if member.serial == serial:
                member.handle = ProcessHandle(pid)
                if member.killed_why is not None:
                    member.handle.kill()

    def _ended_as(self, pid: int, status: int) -> None:
        for member in self.pool.members:
            if member.handle is not None and member.handle.pid == pid:
                member.handle.status = status

    def _refused(self, loader: Loader, serial: int, threads: list[str]) -> None:
        """A loader has threads by now, and will not fork."""
        for member in self.pool.members:
            if member.serial == serial and (isinstance(member, Loader) or member.trial):  # type: ignore[attr-defined]
                member.error = WeightUpdateError(_CANNOT_UPDATE.format(", ".join(threads)))
                return
        self._cannot_fork(loader, threads)

    def _cannot_fork(self, loader: Loader, threads: list[str]) -> None:
        """Go on without sharing: a fork would have none of the threads that the model counts on."""
        if loader is not self.pool.loader or not self.pool.forking:
            loader.error = WeightUpdateError(_CANNOT_UPDATE.format(", ".join(threads)))
            loader.kill()
            return
        if not self._loaded_twice and all(n.startswith(DOWNLOADERS) for n in threads):
            self._loaded_twice = True  # what they downloaded is in the cache now
            waiting, loader.waiting = loader.waiting, []
            self.pool.loader = self.pool.starts.loader()
            self.pool.loader.waiting = waiting
            loader.kill()
            return
        log.warning(
            "plugin %s started threads while it was loaded (%s): its replicas cannot share "
            "memory, so each loads its own copy",
            self.pool.spec.plugin,
            ", ".join(sorted(set(threads))),
        )
        self.pool.forking, self.pool.loader = False, None
        waiting = [
            m
            for m in self.pool.members
            if isinstance(m, Worker) and m.handle is None and m.gone_at is None
        ]
        loader.waiting = []
        loader.kill()
        for worker in waiting:
            self.pool.supervisor.forget(worker.channel)
            self.pool.supervisor.forget(worker.stderr)
            self.pool.members.discard(worker)
            worker.release()
            self.pool.guarded(worker.replica, self.pool.starts.worker)
