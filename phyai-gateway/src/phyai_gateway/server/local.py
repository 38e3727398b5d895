"""The router of a single model server: one model, one engine, and what is counted about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Call, Fault, InferReply, InferRequest
from phyai_gateway.metrics import Metrics

if TYPE_CHECKING:
    from phyai_gateway.server.engine_host import EngineHost


class LocalRouter:
    """Sends every request to the host; requests that name no model mean its only one."""

    def __init__(self, host: EngineHost, metrics: Metrics) -> None:
        self._host, self._metrics = host, metrics
        metrics.registry.register(_EngineGauges(lambda: host))

    def models(self) -> tuple[str, ...]:
        return (self._host.contract.name,)

    def contract(self, model: str) -> ModelContract:
        found = self._host.contract
        if model and model != found.name:
            raise Fault("not_found", f"model must be {found.name!r}; got {model[:80]!r}.")
        return found

    def ready(self, model: str) -> bool:
        """Return whether the model takes requests now."""
        return self._host.not_ready() is None

    async def infer(self, request: InferRequest, call: Call) -> InferReply:
        began, outcome = time.monotonic(), "internal"
        try:
            self.contract(request.model)
            if not request.request_id.strip():
                raise Fault("invalid_argument", "request_id must be given; got none.")
            reply, done = await self._host.infer(request, call)
            self._metrics.queue_time.observe(done.queue_s)
            self._metrics.inferred(done.engine_s)
            outcome = "ok"
            return reply
        except Fault as fault:
            outcome = fault.status
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            name, took = self._host.contract.name, time.monotonic() - began
            self._metrics.answered(name, call.protocol, outcome, took)


class _EngineGauges(Collector):
    """What the engine says of its replicas whenever somebody asks for the metrics."""

    def __init__(self, host: Callable[[], Any]) -> None:
        self._host = host

    def describe(self) -> list[Metric]:
        return []  # registering must not ask the engine

    def collect(self) -> list[Metric]:
        host = self._host()
        if host.not_ready() == "starting":
            return []
        model, queue = host.contract.name, host.dispatcher
        waiting = GaugeMetricFamily("phyai_queue_depth", "Requests that wait.", labels=["model"])
        waiting.add_metric([model], queue.waiting)
        running = GaugeMetricFamily(
            "phyai_requests_inflight", "Requests the engine has.", labels=["model"]
        )
        running.add_metric([model], queue.running)
        labels = ["replica"]
        done = CounterMetricFamily("phyai_replica_requests", "Completed.", labels=labels)
        failed = CounterMetricFamily("phyai_replica_failures", "Failed.", labels=labels)
        up = GaugeMetricFamily("phyai_replica_up", "1 when it takes requests.", labels=labels)
        busy = CounterMetricFamily(
            "phyai_replica_busy_seconds",
            "Time the model ran; its rate is the share.",
            labels=labels,
        )
        replicas = host.stats(max_age_s=0.0)["replicas"]
        for replica in replicas:
            name = [str(replica["id"])]
            done.add_metric(name, replica["done"])
            failed.add_metric(name, replica["failed"])
            up.add_metric(name, float(replica["state"] == "ready"))
            # An engine that does not say it is one whose workers are alike.
            alike = min(queue.busy_seconds / len(replicas), time.monotonic())
            busy.add_metric(name, replica.get("busy_s", alike))
        return [waiting, running, done, failed, up, busy]
