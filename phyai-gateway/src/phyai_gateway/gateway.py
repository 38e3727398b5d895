"""The gateway: backends come and go, listeners start and drain; routing is ``router.py``'s."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai_gateway.backend_rules import check_weight, named
from phyai_gateway.backends import Backend, Member, server_id
from phyai_gateway.backends_file import BackendsFile
from phyai_gateway.breaker import Breaker, BreakerSettings, Clock
from phyai_gateway.health import HealthMonitor, ProbeSettings
from phyai_gateway.messages import Fault
from phyai_gateway.metrics import Metrics
from phyai_gateway.pool import Pool
from phyai_gateway.protocols.base import Listener
from phyai_gateway.router import GatewayRouter, RouteSettings
from phyai_gateway.share import Share
from phyai_gateway.state_file import Registration, StateFile
from phyai_gateway.version import VERSION

log = logging.getLogger(__name__)
MAX_BACKENDS = 1024
TICK_S = 1.0
HEARTBEAT_S = 5
SILENCE_S = 15.0

Connect = Callable[[str, str], Backend]
"""(endpoint, model) -> connection; must not block or fail."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """slots: most requests in flight at one backend, unless its contract says otherwise.

    share: which part of the gateway this process is.  queue_per_backend: requests that may wait
    per ready backend.  grace_s: of a drain.
    """

    route: RouteSettings = field(default_factory=RouteSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    breaker: BreakerSettings = field(default_factory=BreakerSettings)
    share: Share = field(default_factory=Share)
    slots: int = 32
    queue_per_backend: int = 16
    allow_mixed: bool = False
    state: Path | None = None
    backends_file: Path | None = None
    grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Heartbeats:
    """What a model server that announced itself is told; interval_s: seconds."""

    server_id: str
    interval_s: int


class RegistryRouter(GatewayRouter):
    """The router that listeners get: model servers may announce themselves through it."""

    gateway: Gateway

    async def register(self, endpoint: str, model: str) -> Heartbeats:
        """Take a server in; it is dropped after 15 s without a heartbeat. Raises Fault."""
        self.gateway.check_alone()
        member = self.gateway.add(model, endpoint, announced=True)
        return Heartbeats(member.id, HEARTBEAT_S)

    async def heartbeat(self, server: str) -> bool:
        return self.gateway.heard(server)


class Gateway:
    """Everything that runs in one gateway process, without its listeners' sockets.

    connect: makes the connection to a backend.  clock: of breakers and heartbeats.
    """

    def __init__(
        self,
        connect: Connect,
        settings: GatewaySettings | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.settings = settings or GatewaySettings()
        self._connect, self._clock = connect, clock
        self.metrics = Metrics(VERSION)
        self.router = RegistryRouter(self.settings.route, self.metrics)
        self.router.gateway = self
        self.health = HealthMonitor(self.settings.probe, self._changed)
        self.state = StateFile(self.settings.state) if self.settings.state else None
        wanted = self.settings.backends_file
        self.file = BackendsFile(wanted, self) if wanted else None
        self.listeners: list[Listener] = []
        self.warnings: list[str] = []
        self.draining = False
        self._announced: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._saving = asyncio.Lock()
        self._saved: list[Registration] | None = None
        self.metrics.follow(lambda: self.router.pools.values())

    # ------------------------------------------------------------ life cycle

    async def start(self) -> None:
        """Take in what was registered before, and begin to look after the backends.

        Raises: ConfigError for a backends file that cannot be used.
        """
        if self.file is not None:
            self.file.load()
            self.metrics.file_state(ok=True)
        saved = self.state.read() if self.state else []
        for row in saved:
            try:
                member = self.add(row.model, row.endpoint, weight=row.weight)
                member.draining = row.draining
            except Fault as fault:
                log.warning("a saved backend is left out: %s", fault.message)
        self._spawn(self._tick())

    async def drain(self) -> bool:
        """Take nothing new; return whether all was answered before the grace was over."""
        self.draining = True
        self._changed()
        waits = [asyncio.ensure_future(listener.drain()) for listener in self.listeners]
        if waits:
            _, late = await asyncio.wait(waits, timeout=self.settings.grace_s)
            for wait in late:
                wait.cancel()
            if late:
                log.warning("grace of %g s is over; what still runs is cut", self.settings.grace_s)
            await asyncio.gather(*waits, return_exceptions=True)
            return not late
        return True

    async def stop(self) -> None:
        """Close listeners and backends now."""
        self.draining = True
        for listener in self.listeners:
            with suppress(Exception):
                await listener.stop()
        await self.health.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.persist()
        for member in self.members():
            with suppress(Exception):
                await member.backend.close()

    # ------------------------------------------------------------ backends

    def members(self) -> list[Member]:
        return [m for pool in self.router.pools.values() for m in pool.members.values()]

    def member(self, server: str) -> Member:
        """Return the backend of an id; raises Fault("not_found")."""
        for member in self.members():
            if member.id == server:
                return member
        raise Fault("not_found", f"server_id must be a listed one; got {server!r:.40}.")

    def add(
        self, model: str, endpoint: str, *, weight: float = 1.0, announced: bool = False
    ) -> Member:
        """Register a backend, not ready until probed; the same pair again is the same one.

        announced: it registered itself and must send heartbeats. Raises Fault.
        """
        model, endpoint = named(model, endpoint)
        check_weight(weight)
        found = server_id(model, endpoint)
        pool = self.router.pools.get(model)
        if pool is not None and found in pool.members:
            member = pool.members[found]
            member.leaving = False
            if not announced:
                self._announced.pop(found, None)  # an operator's word needs no heartbeats
            elif found in self._announced:
                self._announced[found] = self._clock()
            self._changed()
            return member
        if len(self.members()) >= MAX_BACKENDS:
            raise Fault("resource_exhausted", f"at most {MAX_BACKENDS} backends may be registered.")
        if pool is None:
            self._drop_old_pools()
            pool = self.router.pools[model] = Pool(
                model, self.settings.queue_per_backend, self.settings.allow_mixed, self._changed
            )
        member = pool.members[found] = Member(
            found,
            model,
            endpoint,
            self._connect(endpoint, model),
            Breaker(self.settings.breaker, self._clock),
            weight=weight,
            slots=self.settings.share.slots(self.settings.slots),
            share=self.settings.share,
        )
        if announced:
            self._announced[found] = self._clock()
        self.health.watch(pool, member)
        self._changed()
        return member

    def remove(self, server: str) -> Member:
        """Send it nothing new, forget it when its last request is answered. Raises Fault."""
        member = self.member(server)
        if not member.leaving:
            member.leaving = True
            self._spawn(self._forget(member))
            self.router.pools[member.model].wake()
            self._changed()
        return member

    def patch(self, server: str, *, state: str | None, weight: float | None) -> Member:
        """Set it draining or ready again, or its weight. Raises Fault."""
        member = self.member(server)
        if state not in (None, "draining", "ready"):
            raise Fault("invalid_argument", f"state must be draining or ready; got {state!r:.40}.")
        if weight is not None:
            check_weight(weight)
            member.weight = float(weight)
        if state is not None:
            member.draining = state == "draining"
        self.router.pools[member.model].wake()
        self._changed()
        return member

    def check(self, model: Any, endpoint: Any, weight: Any) -> tuple[str, str]:
        """Return model and endpoint as they are kept; raises Fault for what ``add`` refuses."""
        check_weight(weight)
        return named(model, endpoint)

    def check_alone(self) -> None:
        """Raise Fault unless what this process is told is all that the gateway has to know."""
        if self.settings.share.many:
            raise Fault(
                "failed_precondition",
                "backends of a gateway with --workers must be changed in its --backends-file, "
                "which all its processes follow.",
            )

    def heard(self, server: str) -> bool:
        """Note a heartbeat; returns whether the server is still listed."""
        if server in self._announced:
            self._announced[server] = self._clock()
        return any(member.id == server and not member.leaving for member in self.members())

    def _drop_old_pools(self) -> None:
        """Make room among the models: those without backends are kept only while there is some."""
        pools = self.router.pools
        for model in [m for m, pool in pools.items() if not pool.members and not pool.waiting]:
            if len(pools) < MAX_BACKENDS:
                return
            del pools[model]

    async def _forget(self, member: Member) -> None:
        while member.leaving and member.in_flight:
            member.emptied.clear()
            await member.emptied.wait()
        if not member.leaving:
            return  # it was registered again meanwhile
        member.gone = True
        pool = self.router.pools[member.model]
        pool.members.pop(member.id, None)
        self._announced.pop(member.id, None)
        pool.wake()
        self._changed()
        await self.health.forget(member)
        await member.backend.close()

    # ------------------------------------------------------------ looking after

    def snapshot(self) -> dict[str, Any]:
        """Return all that the status page shows."""
        pools = self.router.pools.values()
        return {
            "version": VERSION,
            "draining": self.draining,
            "warnings": [*self.warnings, *self._file_warnings()],
            "backends": [member.snapshot() for member in self.members()],
            "models": [
                {
                    "model_name": pool.model,
                    "ready": len(pool.ready()),
                    "backends": len(pool.members),
                    "queue": pool.waiting,
                    "in_flight": sum(m.in_flight for m in pool.members.values()),
                    "sessions": len(pool.sessions),
                    "requests": sum(m.done + m.failed for m in pool.members.values()),
                }
                for pool in pools
            ],
            "sessions": self.metrics.session_counts(),
            "dropped": self.metrics.drop_counts(),
        }

    def not_ready(self) -> list[str]:
        """Return why the gateway cannot serve all its models now; empty = it can."""
        reasons = ["the gateway is draining"] if self.draining else []
        used = [pool for pool in self.router.pools.values() if pool.members]
        if not used:
            reasons.append("no backend is registered")
        return reasons + [
            f"model {pool.model!r} has no ready backend" for pool in used if not pool.ready()
        ]

    async def changed(self, timeout: float) -> None:
        """Return when something changed, or after the seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._change.wait()

    def _file_warnings(self) -> list[str]:
        found = []
        if self.state is not None and self.state.error is not None:
            reason = self.state.error
            found.append(f"state file was not written: {reason}. Registrations may be lost.")
        if self.file is not None and self.file.error is not None:
            found.append(f"backends file is not taken, and the backends stay: it {self.file.error}")
        return found

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _tick(self) -> None:
        while True:
            try:
                self.tick()
                await self.follow_file()
                await self.persist()
            except Exception:  # must go on: nobody else looks after the backends
                log.exception("housekeeping failed")
            await self.changed(TICK_S)

    def tick(self) -> None:
        """Look for slow, silent and stuck ones once."""
        for pool in self.router.pools.values():
            pool.watch_slowness()
            pool.wake()
        now = self._clock()
        for server, heard in list(self._announced.items()):
            if now - heard > SILENCE_S:
                del self._announced[server]
                with suppress(Fault):
                    self.remove(server)

    async def follow_file(self, *, force: bool = False) -> None:
        """Take in what changed in the backends file; force: as if it had."""
        if self.file is not None and await self.file.follow(force=force):
            self.metrics.file_state(ok=self.file.error is None)
            self._changed()

    def reread(self) -> None:
        """Take in the backends file soon, changed or not."""
        self._spawn(self.follow_file(force=True))

    def _registrations(self) -> list[Registration]:
        """Return what a restart needs; who announces itself or is in a file is known again."""
        filed = self.file.owned if self.file else {}
        return [
            Registration(m.model, m.endpoint, m.weight, m.draining)
            for m in self.members()
            if not m.leaving and m.id not in self._announced and m.id not in filed
        ]

    async def persist(self) -> None:
        """Write the registrations if they are other than those on disk; never raises."""
        async with self._saving:
            rows = self._registrations()
            if self.state is None or rows == self._saved:
                return
            if await asyncio.to_thread(self.state.write, rows):
                self._saved = rows

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
