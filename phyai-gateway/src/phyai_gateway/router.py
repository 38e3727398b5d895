"""Routing of one request: deadline, mailbox, slot, backend, at most one retry, one answer."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from phyai_gateway.backends import Member
from phyai_gateway.breaker import Outcome, outcome_of
from phyai_gateway.contract import ModelContract
from phyai_gateway.faults import GatewayBug, QueueFull
from phyai_gateway.mailbox import Mailboxes, Turn, stale
from phyai_gateway.messages import Call, Fault, InferReply, InferRequest, Status
from phyai_gateway.metrics import Metrics
from phyai_gateway.pool import Lease, Pool
from phyai_gateway.sticky import session_of

log = logging.getLogger(__name__)
GIB = 1 << 30
MARGIN_S = 0.005  # of the remaining time kept back for the way home
RETRIED: tuple[Status, ...] = ("unavailable", "resource_exhausted")
GIVEN_UP = 0.9  # of its time, after which a client that leaves has waited in vain
FAIR_CHANCE = 4.0  # times its usual latency that a backend must have had to be blamed for lateness


@dataclass(frozen=True, slots=True)
class RouteSettings:
    """Times in seconds.  retry_share: of requests, that may be sent a second time.

    retry_burst, stop_burst: such requests at once, of busy servers and of one that stops: it
    refuses all that comes until that is known.
    """

    default_timeout_s: float = 10.0
    max_timeout_s: float = 600.0
    max_observation_age_s: float = 1.0
    max_bytes_in_flight: int = GIB
    retry_share: float = 0.1
    retry_burst: float = 10.0
    stop_burst: float = 256.0


class GatewayRouter:
    """A ``Router`` over pools of backends. Pools are changed by ``Gateway`` alone."""

    def __init__(self, settings: RouteSettings, metrics: Metrics) -> None:
        self.settings, self.metrics = settings, metrics
        self.pools: dict[str, Pool] = {}
        self.mailboxes = Mailboxes(metrics.dropped)
        self.bytes_in_flight = 0
        self.accepted = 0
        """Requests taken and not yet answered."""
        # Two of them: retries of busy servers must leave some for servers that stop.
        self._bursts: dict[Status, float] = {
            "unavailable": settings.stop_burst,
            "resource_exhausted": settings.retry_burst,
        }
        self._retries = dict(self._bursts)

    def models(self) -> tuple[str, ...]:
        """Return the names that backends have, or had and are waited for."""
        return tuple(sorted(m for m, pool in self.pools.items() if pool.members or pool.waiting))

    def contract(self, model: str) -> ModelContract:
        contract = self._pool(model).contract
        if contract is None:
            raise Fault(
                "unavailable", f"no backend of model {model!r} has answered yet.", retry_after=1.0
            )
        return contract

    def ready(self, model: str) -> bool:
        """Return whether a request for the model would find a backend now."""
        return model in self.pools and bool(self.pools[model].ready())

    async def infer(self, request: InferRequest, call: Call) -> InferReply:
        began = time.perf_counter()
        outcome = "internal"
        self.accepted += 1
        try:
            size = self._hold(request)
            try:
                reply = await self._routed(request, call)
            finally:
                self.bytes_in_flight -= size
            outcome = "ok"
            self.metrics.inferred(reply.inference_time_us / 1e6)
            return reply
        except Fault as fault:
            outcome = fault.status
            if fault.status in ("resource_exhausted", "unavailable") and not fault.started:
                self.metrics.rejected.labels(fault.status).inc()
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception:
            log.exception("request %.80s failed inside the gateway", request.request_id)
            raise GatewayBug from None
        finally:
            self.accepted -= 1
            model = request.model if request.model in self.pools else "unknown"
            self.metrics.answered(model, call.protocol, outcome, time.perf_counter() - began)

    async def _routed(self, request: InferRequest, call: Call) -> InferReply:
        if not request.request_id:
            raise Fault("invalid_argument", "request_id must be a text; got an empty one.")
        pool = self._pool(request.model)
        timeout = min(call.remaining(self.settings.default_timeout_s), self.settings.max_timeout_s)
        if timeout <= 0:
            raise Fault("deadline_exceeded", "deadline had passed when the request arrived.")
        now = time.monotonic()
        deadline = now + timeout
        if call.robot is None:
            return await self._attempts(pool, request, deadline, None)
        age = self.settings.max_observation_age_s
        key = (request.model, call.principal, call.robot)
        async with self.mailboxes.turn(key, timeout, age) as turn:
            return await self._attempts(pool, request, deadline, (turn, now + age))

    async def _attempts(
        self, pool: Pool, request: InferRequest, deadline: float, turn: tuple[Turn, float] | None
    ) -> InferReply:
        for status, left in self._retries.items():
            more = self.settings.retry_share / len(RETRIED)
            self._retries[status] = min(left + more, self._bursts[status])
        session = session_of(request.options) if _stateful(pool) else None
        lease = await self._lease(pool, deadline, turn, session=session)
        try:
            return await self._send(pool, lease, request, deadline)
        except Fault as fault:
            if session is not None or not self._may_retry(pool, lease.member, fault):
                raise
            self._retries[fault.status] -= 1
            self.metrics.retries.labels(fault.status).inc()
            first = fault
        try:
            lease = await self._lease(pool, deadline, turn, exclude=lease.member)
        except Fault as second:
            # Nowhere else to go: the first answer says more, unless a newer request took over.
            raise (second if second.status == "cancelled" else first) from None
        finally:
            del first  # it holds this frame, and so the request, by its traceback
        return await self._send(pool, lease, request, deadline)

    def _may_retry(self, pool: Pool, member: Member, fault: Fault) -> bool:
        """Only what provably did not start is sent again, once, and not to the same backend."""
        refused = fault.status == "unavailable" or (
            fault.status == "resource_exhausted" and fault.retry_after is not None
        )
        others = any(m is not member for m in pool.ready())
        return refused and not fault.started and others and self._retries[fault.status] >= 1

    async def _lease(
        self,
        pool: Pool,
        deadline: float,
        turn: tuple[Turn, float] | None,
        *,
        session: tuple[str, bool] | None = None,
        exclude: Member | None = None,
    ) -> Lease:
        began = time.monotonic()
        member = None
        if session is not None:
            member = pool.sessions.member(session[0], session[1], pool.ready(), began)
        until = deadline if turn is None else min(deadline, turn[1])
        try:
            lease = await pool.acquire(
                until,
                member=member,
                exclude=() if exclude is None else (exclude.id,),
                turn=None if turn is None else turn[0],
            )
        except Fault as fault:
            if fault.status == "deadline_exceeded" and until < deadline:
                self.metrics.dropped("stale")
                raise stale(self.settings.max_observation_age_s) from None
            raise
        self.metrics.waited(time.monotonic() - began)
        if session is not None:
            try:
                pool.sessions.check(session[0], lease.member)
            except Fault:
                pool.release(lease, "neutral")
                raise
        return lease

    async def _send(
        self, pool: Pool, lease: Lease, request: InferRequest, deadline: float
    ) -> InferReply:
        member = lease.member
        outcome: Outcome = "neutral"
        began = time.monotonic()
        given = deadline - began
        try:
            reply = await self._ask(member, request, given)
            if reply.request_id != request.request_id:
                raise Fault(
                    "data_loss",
                    "backend answered another request; the answer was discarded.",
                    started=True,
                )
            outcome = "success"
            member.done += 1
            member.latencies.add(time.monotonic() - began)
            return reply
        except Fault as fault:
            outcome = self._blame(member, fault, given)
            raise
        except asyncio.CancelledError:
            # A client that gives up at its deadline is heard of a moment before ours.
            if time.monotonic() - began >= GIVEN_UP * given:
                late = Fault("deadline_exceeded", "client gave up at its deadline.", started=True)
                outcome = self._blame(member, late, given)
            raise
        finally:
            pool.release(lease, outcome)
            self.metrics.asked(time.monotonic() - began)

    async def _ask(self, member: Member, request: InferRequest, given: float) -> InferReply:
        if given <= 0:
            raise Fault("deadline_exceeded", "deadline passed before a backend was asked.")
        backend, allowed = member.backend, given - min(MARGIN_S, given / 10)
        if backend.keeps_time:
            return await backend.infer(request, allowed)
        try:
            async with asyncio.timeout(given):
                return await backend.infer(request, allowed)
        except TimeoutError:
            raise Fault(
                "deadline_exceeded", "backend did not answer within the deadline.", started=True
            ) from None

    def _blame(self, member: Member, fault: Fault, given: float) -> Outcome:
        """Return what the fault says of the backend, which may have had too little time."""
        outcome = outcome_of(fault)
        usual = member.latencies.ewma or self._usual(member)
        if fault.status == "deadline_exceeded" and given < usual * FAIR_CHANCE:
            outcome = "neutral"
        if outcome == "failure":
            member.failed += 1
            member.note_error(f"{fault.status}: {fault.message}")
            if fault.status in ("unavailable", "deadline_exceeded"):
                member.hurry.set()  # ask now whether it is still there
        elif outcome == "success":
            member.done += 1
        return outcome

    def _usual(self, member: Member) -> float:
        """Return the seconds that others like it need: it has not answered anything yet."""
        pool = self.pools.get(member.model)
        known = [m.latencies.ewma for m in pool.members.values()] if pool is not None else []
        unknown = self.settings.default_timeout_s / FAIR_CHANCE / 2
        return min((one for one in known if one is not None), default=unknown)

    def _pool(self, model: str) -> Pool:
        if (pool := self.pools.get(model)) is None:
            known = ", ".join(self.models()) or "none yet"
            raise Fault("not_found", f"model must be one of: {known}; got {model!r:.80}.")
        return pool

    def _hold(self, request: InferRequest) -> int:
        """Count the request's bytes against what may be held at once; returns their number."""
        size = request_bytes(request)
        if self.bytes_in_flight + size > self.settings.max_bytes_in_flight:
            raise QueueFull("gateway holds as many payload bytes as it may. Try later.", 0.5)
        self.bytes_in_flight += size
        return size


def request_bytes(request: InferRequest) -> int:
    """Return the payload bytes of a request, which may still be encoded."""
    size = len(getattr(request, "payload", b""))
    size += sum(memoryview(image.data).nbytes for image in request.images)
    size += sum(tensor.nbytes for tensor in request.inputs.values())
    return size + (request.state.nbytes if request.state is not None else 0)


def _stateful(pool: Pool) -> bool:
    return pool.contract is not None and pool.contract.stateful
