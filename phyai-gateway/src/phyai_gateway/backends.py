"""A backend: the connection to it, and what the gateway knows of it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from phyai_gateway.breaker import Breaker, Clock
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import InferReply, InferRequest
from phyai_gateway.share import Share

MemberState = Literal["connecting", "ready", "ejected", "draining", "gone"]
NOT_SERVING = "not_serving"
"""``Fault.reason`` of a probe that was answered, with no."""
WINDOW = 256  # latest requests that percentiles are of
EWMA_WEIGHT = 0.2
PROBE = "probe: "  # how a probe's complaint begins in last_error


class Backend(ABC):
    """The connection to one model server. Making one connects nothing and cannot fail.

    keeps_time: ``infer`` itself ends in time, so that nobody has to watch it.
    """

    keeps_time: ClassVar[bool] = False

    @abstractmethod
    async def infer(self, request: InferRequest, timeout: float) -> InferReply:
        """Return its answer; raises Fault, whose ``started`` is honest. timeout: seconds."""

    @abstractmethod
    async def probe(self) -> None:
        """Return if the server says that it serves the model; raises Fault if not."""

    @abstractmethod
    async def contract(self) -> ModelContract:
        """Return what it publishes; raises Fault."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; may be called twice."""


def server_id(model: str, endpoint: str) -> str:
    """Return the id of a backend: the same pair always has the same one.

    >>> server_id("pi05", "127.0.0.1:50063") == server_id("pi05", "127.0.0.1:50063")
    True
    """
    return hashlib.sha256(f"{model}\0{endpoint}".encode()).hexdigest()[:16]


class Latencies:
    """Percentiles of the latest requests, and a moving mean; in seconds.

    >>> found = Latencies()
    >>> found.add(0.010)
    >>> found.quantile(0.5)
    0.01
    """

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=WINDOW)
        self.ewma: float | None = None

    def __len__(self) -> int:
        return len(self._window)

    def add(self, seconds: float) -> None:
        self._window.append(seconds)
        old = self.ewma
        self.ewma = seconds if old is None else old + EWMA_WEIGHT * (seconds - old)

    def quantile(self, q: float) -> float | None:
        """Return the nearest-rank quantile; None before the first request."""
        if not self._window:
            return None
        ordered = sorted(self._window)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]

    def clear(self) -> None:
        self._window.clear()


@dataclass(eq=False, slots=True)
class Member:
    """One backend behind a model name.

    up: by its probes.  refusal: why its contract keeps it out.  incarnation: grows when it comes
    back after being down, for sessions of before are lost.  slots: most requests in flight.
    picked: when it was last chosen, for fair ties.
    """

    id: str
    model: str
    endpoint: str
    backend: Backend
    breaker: Breaker
    clock: Clock = time.monotonic
    weight: float = 1.0
    slots: int = 32
    share: Share = field(default_factory=Share)
    up: bool = False
    draining: bool = False
    leaving: bool = False
    gone: bool = False
    refusal: str | None = None
    contract: ModelContract | None = None
    incarnation: int = 0
    probe_failures: int = 0
    in_flight: int = 0
    picked: int = 0
    done: int = 0
    failed: int = 0
    last_error: str | None = None
    error_before_probe: str | None = None
    latencies: Latencies = field(default_factory=Latencies)
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def state(self) -> MemberState:
        if self.gone:
            return "gone"
        if self.draining or self.leaving:
            return "draining"
        if not self.up or self.refusal is not None:
            # One that was ready before is ejected by its probes; a new one is still connecting.
            return "ejected" if self.incarnation and self.refusal is None else "connecting"
        return "ready" if self.breaker.state == "closed" else "ejected"

    @property
    def alive(self) -> bool:
        """Whether it can serve at all, though not necessarily a new request now."""
        return self.up and self.refusal is None and not self.gone and not self.leaving

    @property
    def routable(self) -> bool:
        """Whether it takes new requests, as soon as it has a free slot."""
        return self.alive and not self.draining and self.breaker.admits

    @property
    def cost(self) -> float:
        """Requests in flight with this one, by its weight and its share after a return."""
        return (self.in_flight + 1) / (self.weight * self.breaker.share)

    def note_error(self, text: str) -> None:
        self.last_error = text[:300]

    def note_probe(self, problem: str | None) -> None:
        """Keep what a probe found; a good one makes the complaint of an earlier one obsolete.

        One that never was down tells again what requests or an ejection had said before.
        """
        complained = self.last_error is not None and self.last_error.startswith(PROBE)
        if problem is not None:
            if not complained:
                self.error_before_probe = self.last_error
            self.note_error(f"{PROBE}{problem}")
        elif complained:
            self.last_error = self.error_before_probe if self.up else None
            self.error_before_probe = None

    def snapshot(self) -> dict[str, Any]:
        """Return its row of ``/v1/backends``, the first five keys as upstream names them."""
        p50, p99 = self.latencies.quantile(0.5), self.latencies.quantile(0.99)
        total = self.done + self.failed
        return {
            "server_id": self.id,
            "model_name": self.model,
            "endpoint": self.endpoint,
            "healthy": self.state == "ready",
            "in_flight_requests": self.in_flight,
            "state": self.state,
            "circuit": self.breaker.state,
            "weight": self.weight,
            "requests": total,
            "failures": self.failed,
            "error_rate": self.failed / total if total else 0.0,
            "p50_ms": None if p50 is None else round(p50 * 1e3, 3),
            "p99_ms": None if p99 is None else round(p99 * 1e3, 3),
            "last_error": self.refusal or self.last_error,
            "contract": self.contract.fingerprint if self.contract else None,
        }
