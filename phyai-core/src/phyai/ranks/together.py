"""Ranks: what all ranks of a replica do together, and what becomes of it when they no longer can.

Every rank does the same things in the same order. Rank 0, the lead, says what; the others follow.
After each they agree how it went: a failure that all of them had alike leaves the replica as it
was, any other one ends it, because nobody knows where its ranks are then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from phyai.errors import (
    ActionRejected,
    CapacityError,
    CommTimeoutError,
    EngineUnavailableError,
    PhyaiError,
    RequestError,
    WeightUpdateError,
)
from phyai.joining import Failed, runs_alone
from phyai.memory import is_out_of_memory
from phyai.parallel import ParallelService
from phyai.ranks.batches import Batch, check_sessions, failed, for_callers
from phyai.ranks.messages import Message, on_host, receive
from phyai.ranks.outcomes import as_text, different, digest, refused, unlike
from phyai.ranks.stopping import NoStops, SharedStops
from phyai.request_watch import Stops
from phyai.types import Prepared
from phyai.weights import check_given

if TYPE_CHECKING:
    from torch import Tensor

    from phyai.engine_core import EngineCore
    from phyai.request_job import Job

T = TypeVar("T")

log = logging.getLogger("phyai")

REQUEST, REFUSED, UPDATE, READY, CLOSE, RESULT = range(1, 7)
_CALLS = {REQUEST: "a request", UPDATE: "update_weights_all"}
FAILED_WAIT_S = 10.0
"""How long a rank that failed waits for the others to say that they did, too: for what all tend to
have, if not at once (``_COMMON``, no memory), as long as for any collective."""
_COMMON = (RequestError, CapacityError, ActionRejected)
CLOSE_WAIT_S = 2.0


class Ranks:
    """One rank's part of a replica of several; used under the lock of its core.

    parallel: this rank and its groups.  output_rank: whose results count.

    Calls have numbers, drawn when they are made. Where a launcher runs the ranks, every rank makes
    the same calls in the same order, and its n-th gets the outcome of rank 0's n-th, in whatever
    order these run.
    """

    def __init__(self, core: EngineCore, parallel: ParallelService, output_rank: int = 0) -> None:
        self.core, self.parallel, self.output_rank = core, parallel, output_rank
        self.timeout_s = core.config.parallel.timeout_s
        self.pids: tuple[int, ...] = ()
        self.broken: PhyaiError | None = None
        self.closed = False
        self._tickets = count()
        self._outcomes: dict[int, tuple[int, Any]] = {}  # ticket -> what was asked, its outcome
        self._heard, self._hearing = threading.Condition(), False
        self._ready = False

    @property
    def leads(self) -> bool:
        """Return whether this rank says what is done."""
        return self.parallel.is_lead

    def assemble(self) -> None:
        """Wait until every rank has loaded its part. Raises: CommTimeoutError."""
        patience = self.core.config.runtime.dist_timeout_s
        mine = torch.tensor([os.getpid()])
        with self.in_step():
            pids = self.parallel.control.all_gather(mine, timeout_s=patience)
        self.pids = tuple(pids.flatten().tolist())
        if self.parallel.rank != self.output_rank:
            # They may read a clock or a counter: one rank judges, and the others hear of it.
            self.core.runner.validators = []

    def ticket(self) -> int:
        """Return the number of a call that is made now."""
        return next(self._tickets)

    # ------------------------------------------------------------ rank 0

    def announce(self, jobs: Sequence[Job]) -> Stops:
        """Have all ranks run prepared requests as one batch; then ``together``.

        Returns: what hears of the batch's steps on this rank.
        Raises: RequestError for what cannot travel; EngineUnavailableError, CommTimeoutError.
        """
        requests = tuple(job.prepared for job in jobs if job.prepared is not None)
        watches = [job.watch for job in jobs if job.prepared is not None]
        tickets = tuple(job.ticket for job in jobs)
        stoppable = any(watch.stoppable or watch.stop_asked for watch in watches)
        lone = tuple(job.lone for job in jobs)
        message = self._message(Batch(tickets, lone, requests, stoppable))
        for job in jobs:
            job.told = True
        self._say(message)
        return SharedStops(self, len(watches), watches) if stoppable else NoStops(watches)

    def run_prepared(self, request: Prepared) -> None:
        """Have all ranks run what nobody asked for."""
        self._say(self._message(Batch((), (), (request,))))
        self._unasked(request)

    def _unasked(self, request: Prepared) -> None:
        (outcome,) = self.together(lambda: self.core.runner.run_joined((request,)))
        if isinstance(outcome, Failed):
            raise outcome.error

    def _message(self, batch: Batch) -> Message:
        """Return the message of a batch. Raises: RequestError for what cannot travel."""
        check_sessions(batch, self.parallel.mesh.world)
        return Message(REQUEST, batch, where="prepared")

    def refuse(self, ticket: int, error: BaseException) -> None:
        """Tell the ranks the error of a request that does not run."""
        with self.core.lock:
            if self.broken is None and not self.closed:
                try:
                    self._say(Message(REFUSED, (ticket, error)))
                except CommTimeoutError as late:
                    log.error("ranks did not hear of a request that failed: %s", late)

    def announce_update(
        self, items: Iterable[tuple[str, Tensor]], ticket: int
    ) -> dict[str, Tensor]:
        """Have all ranks take over weights; then ``together``. Returns what they got."""
        try:
            given = {n: check_given(n, tensor).detach().cpu() for n, tensor in dict(items).items()}
            message = Message(UPDATE, (ticket, given), where="weights")
        except Exception as error:
            refusal = (
                error
                if isinstance(error, WeightUpdateError)
                else WeightUpdateError(
                    "weights must be names with tensors that can travel to all ranks; got "
                    f"{type(error).__name__}: {error}. Send them so; nothing was changed."
                )
            )
            self._say(Message(REFUSED, (ticket, refusal)))
            raise refusal from None
        self._say(message)
        return given

    def announce_ready(self) -> None:
        """Tell the ranks that requests may come."""
        self._say(Message(READY, None))

    def close(self) -> None:
        """Let the others go; they may be gone. Idempotent."""
        if self.leads and not self.closed and self.broken is None:
            with contextlib.suppress(CommTimeoutError):
                Message(CLOSE, None).send(self.parallel.control, timeout_s=CLOSE_WAIT_S)
        self.closed = True

    def _say(self, message: Message) -> None:
        self.check()
        with self.in_step():
            message.send(self.parallel.control, timeout_s=self.timeout_s)

    # ------------------------------------------------------------ the others

    def serve(self) -> None:
        """Do what rank 0 says until it closes.

        Raises: what broke the replica.
        """
        while not self.closed:
            self._obey(keep=False)

    def until_ready(self) -> None:
        """Do what rank 0 says until it says that requests may come."""
        while not (self._ready or self.closed):
            self._obey(keep=False)

    def answer(self, asked: int, ticket: int) -> Any:
        """Return the outcome of a call of this rank, doing what rank 0 says until it is there.

        Calls may wait on several threads: one of them at a time does what rank 0 says.
        Raises: what rank 0's call failed with; EngineUnavailableError when the ranks' calls differ.
        """
        with self._heard:
            while ticket not in self._outcomes:
                self.check()
                if self._hearing:
                    self._heard.wait()
                else:
                    self._hear()
            kind, outcome = self._outcomes.pop(ticket)
        if isinstance(outcome, Failed):
            raise outcome.error
        if kind != asked:
            raise EngineUnavailableError(
                f"all ranks must make the same calls in the same order; got {_CALLS[kind]} on rank "
                f"0 where rank {self.parallel.rank} called {_CALLS[asked]}. Change the program.",
                reason="wrong_mode",
            )
        return outcome

    def _hear(self) -> None:
        """Do one thing that rank 0 says, while others wait for their outcomes."""
        self._hearing = True
        self._heard.release()
        try:
            self._obey(keep=True)
        finally:
            self._heard.acquire()
            self._hearing = False
            self._heard.notify_all()

    def _obey(self, keep: bool) -> None:
        """Do one thing that rank 0 says.  keep: the outcomes, for ``answer``."""
        self.check()
        with self.in_step():
            kind, value = receive(self.parallel.control, timeout_s=self.timeout_s)
            found: dict[int, Any] = {}
            if kind == CLOSE:
                self.closed = True
            elif kind == READY:
                self._ready = True
            elif kind == REFUSED:
                ticket, refusal = value
                found[ticket] = Failed(refusal)
            elif kind == UPDATE:
                ticket, items = value
                found[ticket] = self._updated(items)
            else:
                found.update(zip(value.tickets, self._outcomes_of(value), strict=False))
        if keep:
            self._outcomes.update((ticket, (kind, outcome)) for ticket, outcome in found.items())

    def _updated(self, items: Mapping[str, Tensor]) -> Failed | None:
        try:
            with self.core.lock:
                self.core.apply_weights(items)
        except Exception as error:
            if self.broken is not None:
                raise
            return Failed(error)
        return None

    def _outcomes_of(self, batch: Batch) -> list[Any]:
        """Return what each request of a batch gets; nothing when each is going to run alone."""
        try:
            with self.core.lock:
                if not batch.tickets:
                    self._unasked(batch.requests[0])
                    return []
                shared = SharedStops(self, len(batch.requests)) if batch.stoppable else None
                results, stages = self.core.run_batch(batch.requests, shared)
        except BaseException as error:
            if self.broken is not None:
                raise
            if len(batch.requests) > 1 and runs_alone(error):
                return []
            return [failed(error, self.core.plugin)] * len(batch.requests)
        return for_callers(batch, results, stages, self.core.plugin)

    # ------------------------------------------------------------ all of them

    def check(self) -> None:
        """Raise EngineUnavailableError when the ranks can do nothing together any more."""
        if self.broken is not None:
            raise EngineUnavailableError(
                f"all ranks of a replica must go on together; got one that failed: {self.broken} "
                "Start all ranks again.",
                reason="poisoned",
            ) from self.broken
        if self.closed:
            raise EngineUnavailableError(
                "engine must be open to take requests; it is closed. Create a new Engine.",
                reason="closed",
            )

    def together(self, act: Callable[[], T]) -> T:
        """Return what ``act`` gives, which all ranks do now.

        Raises: what it raises, when it raised alike on all ranks, which can go on then;
            CommTimeoutError, EngineUnavailableError when they cannot.
        """
        began, error, result = self._collectives(), None, None
        try:
            result = act()
        except (CommTimeoutError, KeyboardInterrupt) as lost:
            self._give_up(lost)
            raise
        except BaseException as raised:
            if self.broken is not None:
                raise  # it was found on the way that the ranks are no longer together
            error = raised
        judged = self._agree(error, result, self._collectives() - began)
        if error is not None:
            raise error
        if self.output_rank:
            return self._from_output_rank(result)  # type: ignore[no-any-return]
        return self._as_judged(result) if judged else result  # type: ignore[return-value]

    def _collectives(self) -> int:
        """Return how many there were; those of captured regions count once."""
        groups = (self.parallel.tp, self.parallel.cfg, self.parallel.world)
        return sum(group.traffic.collectives for group in groups)

    def _agree(self, error: BaseException | None, result: Any, collectives: int) -> int:
        """Return when all ranks had the same outcome; raise what they cannot go on with.

        Returns: how many requests of the batch the output rank's validators refused.
        """
        control, wait_s, fails = self.parallel.control, self.timeout_s, error is not None
        if error is not None and not (isinstance(error, _COMMON) or is_out_of_memory(error)):
            wait_s = min(wait_s, FAILED_WAIT_S)
        judged = sum(one is not None for one in refused(result))
        mine = torch.tensor([digest(error, result), collectives if fails else judged])
        with self.in_step():
            try:
                outcomes = control.all_gather(mine, timeout_s=wait_s)
                kinds, counts = outcomes.T
                alike = bool((kinds == kinds[0]).all())
                if alike and (not fails or bool((counts == counts[0]).all())):
                    return 0 if fails else int(counts[self.output_rank])
                raise different(control.all_gather(as_text(error), timeout_s=wait_s)) from error
            except CommTimeoutError:
                if error is None:
                    raise
                alone = f"rank {self.parallel.rank}: {type(error).__name__}: {error}"
                raise unlike(f"{alone}, and none of others") from error

    def meet(self, place: int, value: int) -> list[int]:
        """Return what every rank has to say at a place on the way through a batch.

        place: a negative number, the same on all ranks.  value: any.
        Raises: EngineUnavailableError when a rank is at the end already, for it failed alone;
            CommTimeoutError.
        """
        with self.in_step():
            mine = torch.tensor([place, value])  # as in ``_agree``, where a rank that failed is
            said = self.parallel.control.all_gather(mine, timeout_s=self.timeout_s)
            if bool((said[:, 0] == place).all()):
                values: list[int] = said[:, 1].tolist()
                return values
            raise different(
                self.parallel.control.all_gather(as_text(None), timeout_s=self.timeout_s)
            )

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Nothing in here may fail: ranks that do not say or hear all of it are out of step."""
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise

    def _as_judged(self, outcomes: Any) -> Any:
        """Return a batch's outcomes, on all ranks without what rank 0's validators refused."""
        found = self._from_output_rank(refused(outcomes))
        return [
            outcome if error is None else Failed(error)
            for outcome, error in zip(outcomes, found, strict=True)
        ]

    def _from_output_rank(self, result: Any) -> Any:
        """Return what the rank whose results count has; what it cannot send is an error of all."""
        control, source, found = self.parallel.control, self.output_rank, result
        limit_s = self.timeout_s
        with self.in_step():
            if self.parallel.rank != source:
                _, found = receive(control, source, idle_s=limit_s, timeout_s=limit_s)
            else:
                try:
                    message = Message(RESULT, on_host(result), where="result")
                except RequestError as error:
                    found, message = error, Message(RESULT, error)
                message.send(control, source, timeout_s=limit_s)
        if isinstance(found, BaseException):
            raise found
        return found

    def _give_up(self, error: BaseException) -> BaseException:
        """Do nothing together any more; return the error to raise."""
        if self.broken is None:
            self.broken = PhyaiError(f"{type(error).__name__}: {error}")
        return error
