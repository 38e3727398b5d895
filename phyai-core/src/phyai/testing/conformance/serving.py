"""Level 3: many threads, bad requests, cancelled futures, long runs, other processes."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from phyai.engine import Engine
from phyai.errors import RequestError
from phyai.testing.conformance.check import Failure, checks_of
from phyai.testing.conformance.requests import another, malformed, with_options
from phyai.testing.conformance.results import Arrays, arrays, other_bits
from phyai.testing.conformance.subject import Subject, step
from phyai.testing.conformance.worker import results_of_a_worker
from phyai.types import Observation

THREADS = 4
PREPARES = 25
PREPARE_S = 0.4
"""Least number of requests each thread prepares, and for how long it goes on."""
ROUNDS = 3
WARM, TOTAL = 100, 200
"""Requests after which memory is looked at: allocators and caches of libraries have settled."""
MAX_PYTHON_BYTES = 128 << 10
MAX_RESIDENT_BYTES = 16 << 20
ROUNDS = 3
WAIT_S = 120.0


def prepare_is_thread_safe(subject: Subject) -> None:
    """Requests prepared by several threads at once are what they are when prepared alone."""
    adapter = subject.exact.adapter
    requests = subject.requests if len(subject.requests) > 1 else _two(subject)
    want = [_prepared(adapter, request) for request in requests]

    def work(thread: int) -> str:
        started, turn = time.perf_counter(), 0
        while turn < PREPARES or time.perf_counter() - started < PREPARE_S:
            turn += 1
            number = (thread + turn) % len(requests)
            if problem := other_bits(_prepared(adapter, requests[number]), want[number]):
                return f"{problem} (request {number})"
        return ""

    with _eager_switching():
        problems = [p for p in _in_threads(work) if p]
    if problems:
        raise Failure(
            f"prepare() must be thread-safe; {problems[0]} when {THREADS} threads call it at once. "
            "Keep what belongs to a request in local variables, not on self."
        )


def threads_get_their_own_results(subject: Subject) -> None:
    """Requests of several threads, by step and by submit, give what each gives alone."""
    requests = subject.requests if len(subject.requests) > 1 else _two(subject)
    want = [step(subject.exact, request) for request in requests]
    with subject.engine() as engine:

        def work(thread: int) -> str:
            for turn in range(ROUNDS * len(requests)):
                number = (thread + turn) % len(requests)
                if thread % 2:
                    got = arrays(engine.step(requests[number]))
                else:
                    got = arrays(engine.submit(requests[number]).result(WAIT_S))
                if problem := other_bits(got, want[number]):
                    return f"request {number}: {problem}"
            return ""

        with _eager_switching():
            problems = [p for p in _in_threads(work) if p]
    if problems:
        raise Failure(
            f"a request must give the same whoever else sends one; {problems[0]}. Keep what "
            "belongs to a request out of the adapter and its parts."
        )


def malformed_requests_are_refused(subject: Subject) -> None:
    """Each malformed request gives a RequestError, and the next good one its usual bits."""
    core, good, want = subject.exact, subject.requests[0], subject.expected[0]
    sample = subject.observations[0] if subject.observations else None
    options = subject.capability("options") or ()
    for what, request, foreign in malformed(sample, subject.max_rows, options):
        allowed = (RequestError, TypeError) if foreign else (RequestError,)
        _refused(partial(core.step, request), what, allowed)
        if problem := other_bits(step(core, good, f"a good request after {what}"), want):
            raise Failure(f"a good request after {what} must give its usual result; {problem}.")


def queued_request_can_be_cancelled(subject: Subject) -> None:
    """A future cancelled while it waits never runs, and the ones around it succeed."""
    good, want = subject.requests[0], subject.expected[0]
    with subject.engine() as engine:
        with engine.core.lock:  # the engine is busy
            first: Future[Any] = engine.submit(good)
            waiting: Future[Any] = engine.submit(good)
            if not waiting.cancel():
                raise Failure("a future must be cancellable while it waits; cancel() said no.")
            last: Future[Any] = engine.submit(good)
        for name, future in (("before", first), ("after", last)):
            if problem := other_bits(arrays(future.result(WAIT_S)), want):
                raise Failure(f"the request {name} a cancelled one must succeed; {problem}.")
        if not waiting.cancelled():
            raise Failure("a cancelled future must stay cancelled; it got a result.")


def memory_is_steady_over_200_requests(subject: Subject) -> None:
    """Between request 100 and request 200 nothing grows."""
    with subject.engine() as engine:
        stream = [_fresh(subject, number) for number in range(TOTAL)]
        for request in stream[:WARM]:
            engine.step(request)
        tracemalloc.start()
        try:
            # A few more first: tracing itself fills some caches.
            for request in stream[: len(subject.requests) + 3]:
                engine.step(request)
            after = _held(engine)
            # Resident bytes are the whole process's: what else runs in it may need some once. What
            # is kept of requests grows in every round.
            for _ in range(ROUNDS):
                before = after
                for request in stream[WARM:]:
                    engine.step(request)
                after = _held(engine)
                if after["resident bytes"] - before["resident bytes"] <= MAX_RESIDENT_BYTES:
                    break
        finally:
            tracemalloc.stop()
    limits = {"Python bytes": MAX_PYTHON_BYTES, "resident bytes": MAX_RESIDENT_BYTES}
    for name, count in after.items():
        if count - before[name] > limits.get(name, 0):
            raise Failure(
                f"memory must stay where it is; {name} grew from {before[name]:,} to {count:,} "
                f"between request {WARM} and {TOTAL}. Keep nothing of a request on the adapter, "
                "or bound what is kept."
            )


def visible_in_a_spawned_process(subject: Subject) -> None:
    """A worker finds the same version of the plugin by itself and gives the same results."""
    record = subject.record
    if not subject.installed:
        raise Failure(
            f"plugin {record.id!r} must be visible to workers; it is registered in this process "
            "alone. Offer it by an entry point of group phyai.plugins."
        )
    config = subject.config(num_threads=torch.get_num_threads())
    results, refusal = results_of_a_worker(
        record.qualified_id, record.version, subject.args, config, subject.requests
    )
    for number, got in enumerate(results):
        if problem := other_bits(got, subject.expected[number]):
            raise Failure(
                f"sample request {number} must give the same in a worker; {problem}. Read nothing "
                "that differs between processes."
            )
    if record.version not in refusal:
        raise Failure(
            f"a worker must refuse another version than {record.version!r}; it said {refusal!r}."
        )


# ---------------------------------------------------------------- internals


def _two(subject: Subject) -> list[Any]:
    """Return the sample and another content of it, so that threads have something to mix up."""
    if not subject.observations:
        return subject.requests
    row = subject.observation()
    return [row, another(row, 77 if subject.takes_option("seed") else None)]


def _fresh(subject: Subject, number: int) -> Any:
    """Return sample ``number`` of a stream, its seed never seen before: nobody may keep it."""
    request = subject.requests[number % len(subject.requests)]
    if isinstance(request, Observation) and subject.takes_option("seed"):
        return with_options(request, seed=1000 + number, noise=None)
    return request


def _prepared(adapter: Any, request: Any) -> Arrays:
    prepared = adapter.prepare(request)
    return arrays(dict(prepared.tensors))


def _in_threads(work: Callable[[int], str]) -> list[str]:
    """Return what each thread found; an exception is what it found."""
    gate = threading.Barrier(THREADS)

    def guarded(thread: int) -> str:
        gate.wait(WAIT_S)
        try:
            return work(thread)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(guarded, range(THREADS)))


@contextmanager
def _eager_switching() -> Iterator[None]:
    """Let threads take turns far more often, so that what they share shows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _refused(call: Callable[[], Any], what: str, allowed: tuple[type[Exception], ...]) -> None:
    wanted = " or ".join(kind.__name__ for kind in allowed)
    try:
        call()
    except allowed as error:
        if not str(error).strip():
            raise Failure(
                f"the {wanted} for {what} must say what is wrong; its message is empty."
            ) from error
        return
    except Exception as error:
        raise Failure(
            f"a request with {what} must give a {wanted}; got {type(error).__name__}: {error}. "
            "Check it in prepare() and raise phyai.errors.RequestError."
        ) from error
    raise Failure(
        f"a request with {what} must give a {wanted}; it ran. Check it in prepare() and raise "
        "phyai.errors.RequestError."
    )


def _held(engine: Engine) -> dict[str, int]:
    """Return what the engine and the process hold."""
    gc.collect()
    core = engine.core
    report = core.memory_report()
    return {
        "buffers": len(core.services.memory.buffers()),
        "buffer bytes": int(report["buffers"] or 0),
        "model bytes": int(report["model"] or 0),
        "regions": len(core.services.graphs.report()),
        "tensors": sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
        "Python bytes": tracemalloc.get_traced_memory()[0],
        "resident bytes": _resident(),
    }


def _resident() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux: the other counts remain
        return 0


_NEEDS = ("l0_can_be_selected", "l1_loads", "l2_requests_succeed")
CHECKS = checks_of(
    3,
    (
        prepare_is_thread_safe,
        threads_get_their_own_results,
        malformed_requests_are_refused,
        queued_request_can_be_cancelled,
        memory_is_steady_over_200_requests,
        visible_in_a_spawned_process,
    ),
    _NEEDS,
)
