"""How a local pool starts its processes: spawned loaders and workers, forked ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from phyai.deployment.calls import Replica
from phyai.deployment.channel import Channel
from phyai.deployment.launch import Launch, WorkerOrder, spawn, worker_threads
from phyai.deployment.members import Follower, Loader, Worker
from phyai.deployment.processes import ProcessHandle, StderrTail
from phyai.errors import ConfigError
from phyai.ranks.spawned import MeetingPlace, RankOrder, loopback

if TYPE_CHECKING:
    from phyai.deployment.local_pool import LocalPool


LOADER_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}
"""Libraries that start their threads when they are imported must not do it in a loader."""


class Starts:
    """Starts processes of a pool; on the supervisor's thread, as they belong to it."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool, self.spec = pool, pool.spec

    def loader(self) -> Loader:
        """Spawn a loader. Raises: what keeps the plugin's arguments from travelling."""
        # Its workers get this many; itself must run no parallel code before it forks.
        variables = {**LOADER_VARIABLES, "OMP_NUM_THREADS": str(self._threads())}
        launch = self._launch("cpu", threads=1)
        stderr = StderrTail()
        lifeline = self.pool.lifeline.reader
        with closing_if_it_fails(stderr):
            process, handle, sock = spawn(
                "loader", launch, None, lifeline=lifeline, stderr=stderr.writer, variables=variables
            )
        member = Loader(Channel(sock, "parent"), stderr, process, handle)
        self.pool.join(member)
        return member

    def worker(self, replica: Replica) -> Worker:
        """Spawn a worker that loads its own copy."""
        (device,) = replica.devices
        return self._worker(replica, device, self._order(replica))

    def ranks(self, replica: Replica) -> Worker:
        """Spawn every rank of a replica; return rank 0."""
        place, output_rank = MeetingPlace(), self.spec.deployment.output_rank
        orders = [
            replace(self._order(replica), ranks=RankOrder(rank, place.descriptor, output_rank))
            for rank in range(len(replica.devices))
        ]
        try:
            lead = self._worker(replica, replica.devices[0], orders[0])
            try:
                for rank, device in enumerate(replica.devices[1:], start=1):
                    parts = self._spawn("rank", device, orders[rank])
                    follower = Follower(*parts, lead=lead, rank=rank)
                    lead.followers.append(follower)
                    self.pool.join(follower)
            except BaseException:
                self.pool.retire(lead)
                raise
        finally:
            place.close()
        return lead

    def _worker(self, replica: Replica, device: str, order: WorkerOrder) -> Worker:
        worker = Worker(*self._spawn("worker", device, order), replica=replica)
        self.pool.join(worker)
        return worker

    def _spawn(
        self, role: Literal["worker", "rank"], device: str, order: WorkerOrder
    ) -> tuple[Channel, StderrTail, subprocess.Popen[bytes], ProcessHandle]:
        threads = self._threads()
        variables = {"OMP_NUM_THREADS": str(threads)} if device == "cpu" else {}
        keep: tuple[int, ...] = ()
        if order.ranks is not None:
            variables, keep = variables | loopback(os.environ), (order.ranks.store,)
        stderr = StderrTail()
        with closing_if_it_fails(stderr):
            process, handle, sock = spawn(
                role,
                self._launch(device, threads),
                order,
                lifeline=self.pool.lifeline.reader,
                stderr=stderr.writer,
                variables=variables,
                keep=keep,
            )
        return Channel(sock, "parent"), stderr, process, handle

    def fork(self, loader: Loader, replica: Replica, *, trial: bool = False) -> Worker:
        """Ask a loader for a worker; it is asked once it can fork."""
        ours, theirs = Channel.pair()
        worker = Worker(Channel(ours, "parent"), StderrTail(), replica=replica, trial=trial)
        worker.theirs = theirs.detach()
        self.pool.members.add(worker)
        if loader.loaded:
            self.ask_for(loader, worker)
        else:
            loader.waiting.append(worker)
        return worker

    def ask_for(self, loader: Loader, worker: Worker) -> None:
        """Have a loader that can fork make a worker."""
        worker.loader = loader
        order = (worker.serial, self._order(worker.replica))
        self.pool.post(loader, "fork", order, fds=(worker.theirs, worker.stderr.writer))
        worker.close_theirs()
        self.pool.join(worker)

    def candidate(self, loader: Loader) -> Loader:
        """Have a loader fork another one that can be given new weights."""
        ours, theirs = Channel.pair()
        with theirs:
            member = Loader(Channel(ours, "parent"), StderrTail(), loader=loader)
            fds = (theirs.fileno(), member.stderr.writer)
            self.pool.post(loader, "candidate", member.serial, fds=fds)
        self.pool.join(member)
        return member

    def _launch(self, device: str, threads: int) -> Launch:
        spec, config = self.spec, self.spec.config
        runtime = config.runtime.replace(num_threads=threads) if device == "cpu" else config.runtime
        placed = config.replace(device=config.device.replace(target=device), runtime=runtime)
        return Launch(spec.plugin, spec.plugin_args, placed, spec.version, threads)

    def _order(self, replica: Replica) -> WorkerOrder:
        return WorkerOrder(
            replica.id,
            self._threads(),
            self.pool.limits.heartbeat_s,
            self.spec.deployment.result_device,
            reseed=self.spec.config.runtime.seed is None,
        )

    def _threads(self) -> int:
        processes = sum(len(names) for names in self.spec.devices)
        return worker_threads(self.spec.config.runtime.num_threads, processes)


@contextmanager
def closing_if_it_fails(stderr: StderrTail) -> Iterator[None]:
    """Close a pipe when nobody will write to it."""
    try:
        yield
    except BaseException:
        stderr.close()
        raise


def told(error: Exception) -> Exception:
    """Return an error that says what to do about arguments that cannot reach a worker."""
    if isinstance(error, (TypeError, AttributeError)) or "ickl" in f"{type(error).__name__}{error}":
        return ConfigError(
            "plugin_args and config must be able to travel to a worker process; got "
            f"{type(error).__name__}: {error}. Use functions of an importable module, not lambdas "
            "or local ones, or DeploymentConfig.inline()."
        )
    return error
