"""``robot.RobotInference``: one stream per robot, sensor data in, one action command out per use.

The newest sensor data wins: what arrives while the model works replaces what still waits, and is
counted as superseded.  A message that is wrong ends the stream with its status; a busy model costs
single observations first, and ends the stream when that does not stop.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import grpc

from phyai_gateway.messages import Call, Fault
from phyai_gateway.protocols import robot_messages as messages
from phyai_gateway.protocols.arrivals import Arrivals
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.grpc_listener import Context, GrpcListener, Services
from phyai_gateway.protocols.observation import ends_session, names
from phyai_gateway.protocols.options import Settings

SERVICE = "robot.RobotInference"
BUSY = ("resource_exhausted", "deadline_exceeded")
"""Outcomes that cost one observation: the next one is on its way already."""
BUSY_PAUSE_S, MOST_PAUSE_S = 0.05, 0.5


@dataclass(eq=False, slots=True)
class _Stream:
    """One robot. newest: what waits, and when it came.  failing_since: of a busy model."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    newest: tuple[bytes, float] | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False
    failing_since: float | None = None
    seq: int = 0

    def offer(self, data: bytes) -> bool:
        """Put sensor data into the place of the newest; returns whether older data lost it."""
        lost, self.newest = self.newest is not None, (data, time.monotonic())
        self.arrived.set()
        return lost

    def end(self) -> None:
        self.ended = True
        self.arrived.set()


class RobotListener(GrpcListener):
    """Options: ``model`` that all robots ask for (may be left out when there is one), ``camera``
    that the picture is given to (default ``front``, or the model's only one), ``state`` = all
    (angles, velocities, pose) or joints (angles alone), ``max_observation_age_s`` (1),
    ``give_up_s`` (5) of a busy model before the stream ends, ``idle_s`` (600) without sensor data
    before it does; the first must come as soon as any request."""

    name: ClassVar[str] = "robot"
    default_port: ClassVar[int] = 50112
    largest_bytes: ClassVar[int | None] = messages.MAX_BYTES

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        super().__init__(router, options)
        settings = Settings(self.name, options.options)
        self._model = settings.text("model") or options.default_model
        self._camera = settings.text("camera")
        self._state = settings.text("state", "all") or ""
        self._max_age_s = settings.number("max_observation_age_s", 1.0)
        self._give_up_s = settings.number("give_up_s", 5.0)
        self._idle_s = settings.number("idle_s", 600.0)
        settings.finish()
        if self._state not in messages.STATES:
            raise Fault(
                "invalid_argument",
                f"option state of robot must be of {', '.join(messages.STATES)}; got "
                f"{self._state!r:.40}.",
            )
        self._streams: set[_Stream] = set()
        self._idle = Arrivals(self._idle_s)

    def services(self) -> Services:
        # Raw bytes both ways: what is replaced before its turn is never parsed.
        handler = grpc.stream_stream_rpc_method_handler(self._handle)
        return {SERVICE: {"Communicate": handler}}

    async def drain(self) -> None:
        """Take no more sensor data; streams end when what they have begun is answered."""
        self.health.draining = True
        for stream in self._streams:
            stream.arrived.set()
        await super().drain()
        while self._streams:  # each is told that the server stops
            await asyncio.sleep(0.005)

    # ------------------------------------------------------------ a stream

    async def _handle(self, _: Any, context: Context) -> None:
        await self.guarded(self._communicate(context), context)

    async def _communicate(self, context: Context) -> None:
        headers = self.headers(context)
        principal = self.principal(headers)
        self.check_open()
        if len(self._streams) >= self.options.limits.max_sessions:
            raise Fault(
                "resource_exhausted",
                f"at most {self.options.limits.max_sessions} robots may be connected. Disconnect "
                "one.",
            )
        stream = _Stream()
        self._streams.add(stream)
        self.options.observer.sessions(self.name, len(self._streams))
        reading = asyncio.create_task(self._read(stream, context))
        try:
            while (found := await self._next(stream)) is not None:
                await self._answer(stream, found[0], principal, context)
            if reading.done():
                reading.result()  # what was wrong with reading, if anything was
        finally:
            self._streams.discard(stream)
            self.options.observer.sessions(self.name, len(self._streams))
            reading.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reading

    async def _read(self, stream: _Stream, context: Context) -> None:
        # Who says nothing must not keep others out: there are only so many places.
        arrival, limit_s = self._arrivals, self.options.limits.receive_timeout_s
        try:
            while (data := await arrival.wait(context.read())) is not grpc.aio.EOF:
                arrival, limit_s = self._idle, self._idle_s
                self.options.observer.transferred("in", len(data))
                if stream.offer(data):
                    self.options.observer.dropped("superseded")
        except TimeoutError:
            raise Fault(
                "deadline_exceeded", f"sensor data must come within {limit_s:g} s; none did."
            ) from None
        finally:
            stream.end()

    async def _next(self, stream: _Stream) -> tuple[bytes, float] | None:
        """Return the newest sensor data, None when no more comes; raises Fault on a drain."""
        while True:
            self.check_open()
            found, stream.newest = stream.newest, None
            if found is not None:
                if time.monotonic() - found[1] <= self._max_age_s:
                    return found
                self.options.observer.dropped("stale")
            if stream.ended:
                return None
            stream.arrived.clear()
            await stream.arrived.wait()

    async def _answer(
        self, stream: _Stream, data: bytes, principal: str | None, context: Context
    ) -> None:
        with self.counted(len(data)):
            try:
                sensed = messages.read(data)
                contract = self.router.contract(self._model_name())
                request = messages.request_of(
                    sensed, contract, self._camera, self._state, uuid.uuid4().hex
                )
            except Fault as fault:
                if fault.status == "invalid_argument":
                    self.options.observer.decode_error(self.name, "content")
                raise
            if contract.stateful:
                own = {"session_id": stream.key, "seq": stream.seq}
                request = replace(request, options={**request.options, **own})
            robot = f"robot:{stream.key}"
            call = Call(self.name, robot=robot, principal=principal, peer=context.peer())
            try:
                reply = await self.router.infer(request, call)
            except Fault as fault:
                await self._busy(stream, fault, contract.stateful)
                return
            command = messages.command(reply, sensed)
            stream.failing_since = None
            stream.seq += 1
            await context.write(command)
        self.options.observer.transferred("out", len(command))

    async def _busy(self, stream: _Stream, fault: Fault, stateful: bool) -> None:
        """Go on after a moment if the model is only busy; raises the fault otherwise."""
        now = time.monotonic()
        since = stream.failing_since = stream.failing_since or now
        lost = stateful and ends_session(fault)
        if fault.status not in BUSY or lost or now - since >= self._give_up_s:
            raise fault
        await asyncio.sleep(min(fault.retry_after or BUSY_PAUSE_S, MOST_PAUSE_S))

    def _model_name(self) -> str:
        """Return the model that robots ask for; raises Fault when that is not known."""
        if self._model:
            return self._model
        models = self.router.models()
        if len(models) == 1:
            return models[0]
        raise Fault(
            "failed_precondition",
            f"robots must be given one of the models {names(models)}. Start the gateway with "
            "--robot-model.",
        )
