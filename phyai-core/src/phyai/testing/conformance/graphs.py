"""Level 2: graph back ends equal eager, wrappers change nothing, pluggy stays out of requests."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pluggy
import torch

from phyai.engine_core import EngineCore
from phyai.plugins import add_hooks, load_hook_plugins
from phyai.testing.conformance import identity
from phyai.testing.conformance.check import Failure, NotApplicable, checks_of
from phyai.testing.conformance.identity import Identity
from phyai.testing.conformance.results import other_bits, too_far
from phyai.testing.conformance.subject import Subject, step

_PLUGGY = str(Path(pluggy.__file__).parent)
_PARTS = ("conditioning", "cache", "solver", "denoiser network", "denoiser prediction", "output")


def recorded_graphs_equal_eager(subject: Subject) -> None:
    """Recorded regions, replayed as a GPU replays them, give the bits of eager."""
    _need(subject, "recorded")
    eager_config = subject.reference_config(static_shapes=True)
    with subject.recorded() as graphs, subject.core(eager_config) as eager:
        want = [step(eager, request) for request in subject.requests]
        for turn in ("records", "replays", "replays after other requests"):
            for number, request in enumerate(subject.requests):
                got = step(graphs, request, f"sample request {number} on recorded graphs")
                if reasons := _fallbacks(graphs):
                    raise Failure(
                        f"every region must be capturable; {reasons[0]} Set capture_safe = False "
                        "on a part that cannot be captured."
                    )
                if problem := other_bits(got, want[number]):
                    raise Failure(
                        f"sample request {number} must give the same when its graph {turn}; "
                        f"{problem}. A replay runs no Python: keep branches, counters and new "
                        "tensors out of encode() and the denoiser."
                    )
        _need_captures(graphs)


def compiled_regions_equal_eager(subject: Subject) -> None:
    """Regions compiled by inductor stay within the batch tolerance of eager."""
    _need(subject, "inductor")
    with subject.core(subject.config(graph_backend="inductor")) as compiled:
        for number, request in enumerate(subject.requests):
            for _ in range(2):
                got = step(compiled, request, f"sample request {number} on compiled regions")
                _compare(subject, number, got, "compiled by inductor")
        if reasons := _fallbacks(compiled):
            raise Failure(f"every region must compile; {reasons[0]}")
        _need_captures(compiled)


def cuda_graphs_equal_eager(subject: Subject) -> None:
    """CUDA graphs give what eager gives on the same device."""
    _need(subject, "cuda")
    if not torch.cuda.is_available():
        raise NotApplicable("there is no CUDA device here")
    eager_config = subject.config(device="cuda", static_shapes=True)
    graph_config = subject.config(device="cuda", graph_backend="cuda")
    with subject.core(eager_config) as eager, subject.core(graph_config) as graphs:
        for number, request in enumerate(subject.requests):
            want = step(eager, request)
            for _ in range(3):
                got = step(graphs, request, f"sample request {number} on CUDA graphs")
                if problem := too_far(got, want, subject.given.batch_tolerance):
                    raise Failure(f"sample request {number} must equal eager; {problem}.")
        if reasons := _fallbacks(graphs):
            raise Failure(f"every region must be capturable; {reasons[0]}")
        _need_captures(graphs)


def identity_wrappers_change_nothing(subject: Subject) -> None:
    """With a wrapper that does nothing around every part, results keep their bits."""
    with _wrapped(subject) as (core, hooks):
        for number, request in enumerate(subject.requests):
            got = step(core, request, f"sample request {number} with wrapped parts")
            if problem := other_bits(got, subject.expected[number]):
                raise Failure(
                    f"wrapping every part must change nothing; {problem}. Use the parts core hands "
                    "over (cache, denoiser), not the adapter's own ones behind their back."
                )
        unused = [part for part in _PARTS if not hooks.ran[part]]
    if unused:
        raise Failure(
            f"every part must be used through what the hooks returned; {unused[0]} was not. "
            "Return the part from the adapter's method and do not call it elsewhere."
        )


def requests_pass_by_pluggy(subject: Subject) -> None:
    """Hooks are bound at set-up: a request calls nothing of the plugin manager."""
    with _wrapped(subject) as (core, hooks):
        for request in subject.requests:
            step(core, request)  # the first request of a key is its set-up
        bound = Counter(hooks.bound)
        with _counted_calls() as calls:
            for request in subject.requests:
                step(core, request)
        asked = sum((hooks.bound - bound).values())
    if calls["pluggy"] or asked:
        raise Failure(
            f"a request must not go through pluggy; {calls['pluggy']} calls did, and hooks were "
            f"asked {asked} times. Bind parts at set-up and keep the objects."
        )
    if not calls["identity"]:
        raise Failure("the wrapped parts must run during a request; none did.")


# ---------------------------------------------------------------- internals


def _need(subject: Subject, backend: str) -> None:
    if backend not in subject.given.backends:
        raise NotApplicable(f"back end {backend} was not asked for")


def _compare(subject: Subject, number: int, got: Any, how: str) -> None:
    if problem := too_far(got, subject.expected[number], subject.given.batch_tolerance):
        raise Failure(f"sample request {number} {how} must equal eager; {problem}.")


def _fallbacks(core: EngineCore) -> list[str]:
    """Return why regions run eagerly; parts that say capture_safe = False may."""
    return [
        f"{row.name.partition('/')[2] or row.name}: {row.reason}."
        for row in core.services.graphs.report()
        if row.reason and "not capture-safe" not in row.reason
    ]


def _need_captures(core: EngineCore) -> None:
    """Raise NotApplicable when every region ran eagerly: two eager runs prove nothing."""
    if not core.services.graphs.stats()["captures"]:
        raise NotApplicable("every region runs eagerly: its parts say capture_safe = False")


@contextmanager
def _wrapped(subject: Subject) -> Iterator[tuple[EngineCore, Identity]]:
    hooks, manager = Identity(), load_hook_plugins()
    add_hooks(manager, hooks, "conformance-identity")
    with subject.core(hooks=manager) as core:
        yield core, hooks


@contextmanager
def _counted_calls() -> Iterator[Counter[str]]:
    """Count this thread's calls into pluggy and into the identity wrappers."""
    calls: Counter[str] = Counter()
    wrappers = str(identity.__file__)

    def heard(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            calls["pluggy"] += file.startswith(_PLUGGY)
            calls["identity"] += file == wrappers

    before = sys.getprofile()
    sys.setprofile(heard)
    try:
        yield calls
    finally:
        sys.setprofile(before)


_NEEDS = ("l0_can_be_selected", "l1_loads", "l2_requests_succeed")
CHECKS = checks_of(
    2,
    (
        recorded_graphs_equal_eager,
        compiled_regions_equal_eager,
        cuda_graphs_equal_eager,
        identity_wrappers_change_nothing,
        requests_pass_by_pluggy,
    ),
    _NEEDS,
)
