"""RayPool: replicas as Ray actors, on any node of a cluster; one dead node takes only its own.

A replica of several ranks is an actor per rank, all on one node: rank 0 takes its requests, and the
end of any of them is the end of all.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from phyai import __version__, env
from phyai.deployment.dispatch import Call, Replica
from phyai.deployment.launch import Launch
from phyai.deployment.messages import WATCHED_STEP
from phyai.deployment.pool import PoolSpec, ReplicaPool
from phyai.deployment.ray_actor import RankPlace, RayReplica
from phyai.deployment.ray_cluster import Connection, Resources, import_ray
from phyai.deployment.ray_config import RayConfig
from phyai.deployment.ray_frame import BROKEN, FAILURE, RESULT, Reply, Steps, pack
from phyai.deployment.ray_team import Rank, Team, how_it_died, where
from phyai.deployment.supervisor import Supervisor
from phyai.deployment.values import WireError, decode, decode_error, encode
from phyai.errors import ConfigError

T = TypeVar("T")

log = logging.getLogger("phyai")

PROGRESS_S = 0.25
END_S, GONE_S = 2.0, 5.0
"""How long actors may take to let go of the model, and to be gone after they were killed."""
_STORED_BYTES = 100_000  # larger messages go through the object store
_CALLS = 100_000  # that may wait in one actor: the pool's user bounds them, not Ray


class RayPool(ReplicaPool):
    """Replicas of one model on a Ray cluster; see ``ReplicaPool``.

    Ray places the actors of a replica where there is room, and again after they died. All that is
    heard of them is handled on one thread, which also makes the connection, as that takes seconds.
    """

    def __init__(self, spec: PoolSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        target = spec.config.device.target
        if target not in ("cpu", "cuda"):
            raise ConfigError(
                "EngineConfig.device.target must be 'cpu' or 'cuda' in mode 'ray', which chooses "
                f"the device; got {target!r}. Say what a replica needs: RayConfig(num_gpus=...)."
            )
        self.ranks = spec.config.parallel.infer_replica_world_size()
        self.config = spec.deployment.ray_config or RayConfig()
        gpus = float(target == "cuda") if self.config.num_gpus is None else self.config.num_gpus
        self.resources = Resources(self.config.num_cpus, gpus)
        if self.ranks > 1 and not self.resources.as_bundle():
            raise ConfigError(
                "RayConfig.num_cpus or num_gpus must be above 0 for replicas of several ranks, "
                f"whose room is reserved; got 0 and {self.ranks} ranks. Give num_cpus=0.1."
            )
        self.ray = import_ray()
        devices = ((target,) * self.ranks,) * spec.deployment.replica_count
        super().__init__(replace(spec, devices=devices), clock=clock)
        self._supervisor = Supervisor(self._tick, "phyai-ray")
        self._connection: Connection | None = None
        self._teams: list[Team] = []  # not known to be gone

    # ------------------------------------------------------------ life of a pool

    def _open(self) -> None:
        self._supervisor.start()
        self._soon(self._connect)

    def _connect(self) -> None:
        self._progressed(None, 0, 1, "connecting to Ray")
        try:
            self._connection = Connection(
                self.config, self.resources, self.ranks, len(self.dispatch.replicas)
            )
        except BaseException as error:
            if self._start is not None:
                self._start.error = error
                self._start.events.put(None)

    def _end(self) -> None:
        self._supervisor.stop()  # no new actors from here on
        ready = [team for team in self._teams if team.ready]
        ends = [team.lead.handle.end.remote().future() for team in ready]
        ends += [rank.follows for team in ready for rank in team.ranks if rank.follows is not None]
        wait_for(ends, timeout=END_S)
        for team in self._teams:
            self._destroy(team)
        ranks = [rank for team in self._teams for rank in team.ranks]
        wait_for([rank.watch for rank in ranks if rank.watch is not None], timeout=GONE_S)
        if self._connection is not None:
            self._connection.release()

    def on_own_thread(self) -> bool:
        return self._supervisor.here()

    # ------------------------------------------------------------ starting

    def _launch(self, replica: Replica) -> None:
        self._soon(self._begin_team, replica)

    def _begin_team(self, replica: Replica) -> None:
        if self._connection is None or self.dispatch.closed:
            return
        self._progressed(replica, 0, 1, "waiting for room on the Ray cluster")
        team = Team(replica, None)
        try:
            self._place(self._connection, team)
            meeting = [
                rank.handle.meet.remote(__version__, env.given(), self.ranks) for rank in team.ranks
            ]
        except Exception as error:
            self._destroy(team)
            self._died(replica, None, f"a Ray actor that could not be made: {error}", error)
            return
        self._teams.append(team)
        for rank, met in zip(team.ranks, meeting, strict=True):
            self._hear(met, self._met, rank)
            rank.watch = self._hear(rank.handle.lives.remote(), self._gone, rank)

    def _place(self, connection: Connection, team: Team) -> None:
        team.group, places = connection.reserve(self.resources, self.ranks)
        for number, place in enumerate(places):
            remote = self.ray.remote(RayReplica).options(
                num_cpus=self.resources.num_cpus,
                num_gpus=self.resources.num_gpus,
                max_restarts=0,  # restarts are the pool's: it knows sessions, back-off and limits
                max_task_retries=0,
                max_concurrency=_CALLS,
                **place,
            )
            team.ranks.append(Rank(team, number, remote.remote()))

    def _met(self, rank: Rank, answer: Future[Any]) -> None:
        """An actor runs; the model is loaded once all of the replica do."""
        team = rank.team
        if (reply := self._said(rank, answer)) is None:
            return
        rank.host, rank.descriptor = decode(reply.body, reply.buffers)
        if not team.placed:
            return
        launch, places = self._order(), self._places(team)
        try:
            self._hear(team.lead.handle.load.remote(launch, places[0]), self._loaded, team.lead)
            for other, place in zip(team.ranks[1:], places[1:], strict=True):
                order = other.handle.follow.remote(launch, place)
                other.follows = self._hear(order, self._followed, other)
        except Exception as error:  # arguments that cannot travel
            self._bury(team, f"a Ray actor that could not be started: {error}", error)

    def _order(self) -> Launch:
        """Return what an actor needs to build its copy of the model."""
        spec, config = self.spec, self.spec.config
        threads = config.runtime.num_threads or max(1, int(self.config.num_cpus))
        if self.ranks > 1 and config.device.target == "cuda":  # an actor sees its own devices only
            config = config.replace(device=config.device.replace(target="cuda:0"))
        return Launch(spec.plugin, spec.plugin_args, config, spec.version, threads)

    def _places(self, team: Team) -> list[RankPlace | None]:
        """Return which rank each actor is; None for the only one."""
        lead, output_rank = team.lead, self.spec.deployment.output_rank
        if self.ranks == 1 or lead.host is None:
            return [None]
        pid, file = lead.host.pid, lead.descriptor
        return [RankPlace(rank.number, output_rank, pid, file) for rank in team.ranks]

    def _loaded(self, rank: Rank, answer: Future[Any]) -> None:
        team, host = rank.team, rank.host
        if (reply := self._said(rank, answer)) is None or host is None:
            return
        information, described = decode(reply.body, reply.buffers)
        here = {"node_id": host.node_id, "node": host.address, "actor_id": host.actor_id}
        team.ready, team.asked = True, None
        self._ready(team.replica, team, {**information, **here}, described)

    # ------------------------------------------------------------ hearing

    def _hear(self, ref: Any, callback: Callable[[T, Future[Any]], None], who: T) -> Future[Any]:
        """Have the supervisor's thread call back with ``who`` and the answer."""
        future: Future[Any] = ref.future()
        future.add_done_callback(lambda done: self._soon(callback, who, done))
        return future

    def _soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Have the supervisor's thread do it; nothing once that has ended."""
        with contextlib.suppress(ValueError):
            self._supervisor.soon(partial(self._readable, callback, *args))

    def _readable(self, callback: Callable[..., None], *args: Any) -> None:
        """Do it; a replica whose answer cannot be read is replaced, and so fails its calls."""
        try:
            callback(*args)
        except WireError as error:
            team = args[0].team if isinstance(args[0], Rank) else args[0]
            if not team.gone:
                self._bury(team, f"a Ray actor whose answer cannot be read: {error}")

    def _said(self, rank: Rank, answer: Future[Any]) -> Reply | None:
        """Return what an actor answered to an order; None for an error, which has been seen to."""
        if rank.team.gone:
            return None
        if (failure := answer.exception()) is not None:
            if not isinstance(failure, self.ray.exceptions.RayTaskError):
                self._gone(rank, answer)
            else:  # before any code of ours ran
                self._gave_up(rank, getattr(failure, "cause", None) or failure)
            return None
        reply = Reply.read(answer.result())
        if reply.kind != RESULT:
            self._gave_up(rank, decode_error(reply.body, reply.buffers))
            return None
        return reply

    # ------------------------------------------------------------ ending

    def _kill(self, replica: Replica, why: str) -> None:
        for team in [team for team in self._teams if team.replica is replica]:
            if not team.placed and self._connection is not None:
                why = f"{why} {self._connection.room(self.resources, self.ranks)}"
            self._bury(team, why)

    def _gone(self, rank: Rank, answer: Future[Any]) -> None:
        """An answer that is an error of Ray's: the actor, its node or the way to it is lost."""
        self._lost(rank, answer.exception())

    def _lost(self, rank: Rank, error: BaseException | None) -> None:
        if not rank.team.gone:
            rank.end = how_it_died(rank.host, error)
            self._weigh(rank.team)

    def _gave_up(self, rank: Rank, error: BaseException) -> None:
        """A rank cannot go on; which one is to blame, others may have to say."""
        team = rank.team
        if not team.gone:
            rank.error = error
            if team.gave_up_at is None:
                team.gave_up_at = self.clock()
            self._weigh(team)

    def _followed(self, rank: Rank, answer: Future[Any]) -> None:
        if self._said(rank, answer) is not None:  # rank 0 was closed, but not by us
            rank.end = f"a Ray actor{where(rank.host)} that no longer follows rank 0."
            self._weigh(rank.team)

    def _weigh(self, team: Team) -> None:
        if team.clear_whose_fault(self.clock()):
            self._bury(team, *team.ending())

    def _bury(self, team: Team, why: str, error: BaseException | None = None) -> None:
        team.gone = True
        self._teams.remove(team)
        self._destroy(team)
        self._died(team.replica, team if team.ready else None, why, error)

    def _destroy(self, team: Team) -> None:
        for rank in team.ranks:
            with contextlib.suppress(Exception):
                self.ray.kill(rank.handle)
        if self._connection is not None:
            self._connection.give_back(team.group)

    # ------------------------------------------------------------ calls

    def _send(self, replica: Replica, call: Call) -> None:
        team: Team = call.carrier
        frame = pack(*encode(call.payload))
        # Stored before it is numbered: a number that is never sent would hold up the next calls.
        argument = self.ray.put(frame) if len(frame) > _STORED_BYTES else frame
        kind = WATCHED_STEP if call.watch.listens else call.kind
        try:
            ticket, future = team.send(kind, argument)
        except Exception as error:
            self._soon(self._lost, team.lead, error)
            return
        if call.watch.listens:
            team.watched[ticket] = call.id
        call.future.stop = partial(team.stop, ticket)
        if call.watch.stop_asked:  # maybe before the actor could be told
            team.stop(ticket)
        future.add_done_callback(lambda done: self._soon(self._answered, team, ticket, call, done))

    def _answered(self, team: Team, ticket: int, call: Call, answer: Future[Any]) -> None:
        replica, error = team.replica, answer.exception()
        team.watched.pop(ticket, None)
        if error is None:
            reply = Reply.read(answer.result())
            body, buffers = reply.body, reply.buffers
            if reply.kind == BROKEN:  # the end of the replica fails the call
                self._gave_up(team.lead, decode_error(body, buffers))
                return
            self._tell(team, call.id, reply.steps)
            if reply.kind == FAILURE:
                self._settled(replica, call.id, error=decode_error(body, buffers))
            else:
                self._settled(replica, call.id, result=lambda: decode(body, buffers))
        elif isinstance(error, self.ray.exceptions.RayTaskError):  # ours never raises
            unexpected = RuntimeError(f"replica {replica.id} failed outside a request: {error}")
            self._settled(replica, call.id, error=unexpected)
        else:
            self._gone(team.lead, answer)

    def _tell(self, team: Team, call_id: int, steps: Steps) -> None:
        for done, total in steps:  # all of them; a Watch passes each on once
            self._stepped(team.replica, call_id, done, total)

    # ------------------------------------------------------------ clocks

    def _tick(self) -> float:
        for team in list(self._teams):
            if team.gave_up_at is not None:
                self._weigh(team)
            if not team.gone:
                self._ask(team)
        return self.tick()

    def _ask(self, team: Team) -> None:
        """Ask how far a load or a request is, or for a sign of life, when it is time to."""
        handle, now = team.lead.handle, self.clock()
        every = self.limits.heartbeat_s if team.ready else PROGRESS_S
        if team.asked is None and now - team.asked_at >= every:
            team.asked_at = now
            method = handle.state if team.ready else handle.progress
            team.asked = self._hear(method.remote(), self._told, team)
        if team.watched and team.asked_steps is None and now - team.asked_steps_at >= PROGRESS_S:
            team.asked_steps_at = now
            team.asked_steps = self._hear(handle.steps.remote(), self._told_steps, team)

    def _told(self, team: Team, answer: Future[Any]) -> None:
        if answer is team.asked:
            team.asked = None
        if team.gone or answer.exception() is not None:  # ``lives`` tells of its death
            return
        told = answer.result()
        if isinstance(told, tuple):
            if not team.ready and told != team.told:
                team.told = told
                self._progressed(team.replica, *told)
        elif (reply := Reply.read(told)).kind == RESULT:
            self._heard(team.replica, decode(reply.body, reply.buffers))

    def _told_steps(self, team: Team, answer: Future[Any]) -> None:
        team.asked_steps = None
        if team.gone or answer.exception() is not None:
            return
        for ticket, steps in answer.result().items():
            if (call_id := team.watched.get(ticket)) is not None:
                self._tell(team, call_id, steps)
