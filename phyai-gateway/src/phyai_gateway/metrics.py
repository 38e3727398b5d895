"""Prometheus metrics. Labels come from bounded sets: never robots, sessions or requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CIRCUIT = {"closed": 0.0, "half_open": 1.0, "open": 2.0}
FOLD_AT = 256  # values
MOST_MODELS = 4096  # names that requests are counted by; of later ones all are "other"
DROP_REASONS = ("superseded", "stale", "duplicate", "similar")


class Metrics:
    """Every counter of a gateway; an ``Observer`` for its listeners.

    What every request counts is kept aside and added up when there is much of it, or when somebody
    reads: one by one, between two requests' bytes, it took longer than their routing.

    >>> b"phyai_build_info" in Metrics("0.1.0").text()
    True
    """

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self._answered: list[tuple[str, str, str, float]] = []
        self._times: list[tuple[Histogram, float]] = []
        self._bytes: dict[str, int] = {}
        self._models: set[str] = set()
        reg.register(_Fold(self._fold))  # the first, so before all others are read
        self.requests = Counter(
            "phyai_requests_total",
            "Requests by outcome.",
            ["model", "protocol", "outcome"],
            registry=reg,
        )
        self.duration = Histogram(
            "phyai_request_duration_seconds",
            "From request to answer.",
            ["model", "protocol"],
            buckets=BUCKETS,
            registry=reg,
        )
        self.stage = Histogram(
            "phyai_stage_duration_seconds", "By stage.", ["stage"], buckets=BUCKETS, registry=reg
        )
        self.queue_time = Histogram(
            "phyai_queue_time_seconds", "Wait for a free backend.", buckets=BUCKETS, registry=reg
        )
        self.inference = Histogram(
            "phyai_inference_duration_seconds",
            "Inference as the model server measured it.",
            buckets=BUCKETS,
            registry=reg,
        )
        self.retries = Counter("phyai_retries_total", "Second attempts.", ["reason"], registry=reg)
        self.rejected = Counter("phyai_rejected_total", "Refusals.", ["reason"], registry=reg)
        self.drops = Counter(
            "phyai_observations_dropped_total", "Observations not used.", ["reason"], registry=reg
        )
        self.decode_errors = Counter(
            "phyai_decode_errors_total", "Bytes refused.", ["protocol", "reason"], registry=reg
        )
        self.session_count = Gauge("phyai_sessions", "Sessions held.", ["protocol"], registry=reg)
        self.bytes = Counter("phyai_bytes_total", "Payload bytes.", ["direction"], registry=reg)
        self._queue, self._backend = self.stage.labels("queue"), self.stage.labels("backend")
        self._child = cache(lambda metric, *labels: metric.labels(*labels))
        info = Gauge("phyai_build_info", "Version that runs.", ["version"], registry=reg)
        info.labels(version).set(1)
        for reason in DROP_REASONS:
            self.drops.labels(reason)
        self._file: Gauge | None = None

    def answered(self, model: str, protocol: str, outcome: str, seconds: float) -> None:
        """Count a request that has its answer."""
        self._answered.append((model, protocol, outcome, seconds))
        if len(self._answered) >= FOLD_AT:
            self._fold()

    def inferred(self, seconds: float) -> None:
        """Note how long a model worked, as its server says."""
        self._times.append((self.inference, seconds))

    def waited(self, seconds: float) -> None:
        """Note how long a request waited for a backend."""
        self._times.append((self._queue, seconds))

    def asked(self, seconds: float) -> None:
        """Note how long a backend took."""
        self._times.append((self._backend, seconds))

    def dropped(self, reason: str) -> None:
        self.drops.labels(reason if reason in DROP_REASONS else "other").inc()

    def decode_error(self, protocol: str, reason: str) -> None:
        self.decode_errors.labels(protocol, reason).inc()

    def sessions(self, protocol: str, count: int) -> None:
        self.session_count.labels(protocol).set(count)

    def transferred(self, direction: str, count: int) -> None:
        self._bytes[direction] = self._bytes.get(direction, 0) + count

    def file_state(self, *, ok: bool) -> None:
        """Say whether the backends file is taken as it is; without a file there's no such gauge."""
        if self._file is None:
            text = "1 when the file is taken as it is."
            self._file = Gauge("phyai_backends_file_ok", text, registry=self.registry)
        self._file.set(ok)

    def drop_counts(self) -> dict[str, int]:
        """Return the dropped observations by reason, for the status page."""
        samples = (s for family in self.drops.collect() for s in family.samples)
        return {s.labels["reason"]: int(s.value) for s in samples if s.name.endswith("_total")}

    def session_counts(self) -> dict[str, int]:
        samples = (s for family in self.session_count.collect() for s in family.samples)
        return {s.labels["protocol"]: int(s.value) for s in samples}

    def follow(self, pools: Callable[[], Iterable[Any]]) -> None:
        """Read the gauges of pools and backends whenever somebody asks for the metrics."""
        self.registry.register(_Pools(pools))

    def text(self) -> bytes:
        """Return all in Prometheus's text form."""
        return generate_latest(self.registry)

    def _fold(self) -> None:
        answered, self._answered = self._answered, []
        times, self._times = self._times, []
        moved, self._bytes = self._bytes, {}
        for model, protocol, outcome, seconds in answered:
            if model not in self._models:  # whoever may register servers can name ever new ones
                if len(self._models) >= MOST_MODELS:
                    model = "other"
                self._models.add(model)
            self._child(self.requests, model, protocol, outcome).inc()
            self._child(self.duration, model, protocol).observe(seconds)
        for histogram, seconds in times:
            histogram.observe(seconds)
            if histogram is self._queue:
                self.queue_time.observe(seconds)
        for direction, count in moved.items():
            self.bytes.labels(direction).inc(count)


class _Fold(Collector):
    """Has no metrics: asked for them, it completes those of others."""

    def __init__(self, fold: Callable[[], None]) -> None:
        self._fold = fold

    def collect(self) -> Iterator[Metric]:
        self._fold()
        return iter(())


class _Pools(Collector):
    def __init__(self, pools: Callable[[], Iterable[Any]]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        queue = GaugeMetricFamily("phyai_queue_depth", "Requests that wait.", labels=["model"])
        running = GaugeMetricFamily("phyai_requests_inflight", "At backends.", labels=["model"])
        gauges = {
            name: GaugeMetricFamily(f"phyai_backend_{name}", text, labels=["backend"])
            for name, text in (
                ("inflight", "Requests in flight."),
                ("up", "1 when ready."),
                ("circuit_state", "0 closed, 1 half open, 2 open."),
                ("latency_ewma_seconds", "Moving mean."),
            )
        }
        for pool in self._pools():
            queue.add_metric([pool.model], pool.waiting)
            running.add_metric([pool.model], sum(m.in_flight for m in pool.members.values()))
            for member in pool.members.values():
                gauges["inflight"].add_metric([member.id], member.in_flight)
                gauges["up"].add_metric([member.id], float(member.state == "ready"))
                gauges["circuit_state"].add_metric([member.id], CIRCUIT[member.breaker.state])
                ewma = member.latencies.ewma
                gauges["latency_ewma_seconds"].add_metric([member.id], ewma or 0.0)
        yield from (queue, running, *gauges.values())
