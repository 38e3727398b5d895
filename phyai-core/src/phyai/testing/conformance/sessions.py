"""Level 3: sessions, for plugins that declare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phyai.engine import Engine
from phyai.engine_core import EngineCore
from phyai.errors import (
    ActionRejected,
    PhyaiError,
    RequestError,
    SessionClosed,
    SessionEvicted,
    SessionExpired,
    SessionLost,
    SessionUnknown,
)
from phyai.hooks import hookimpl
from phyai.plugins import add_hooks, load_hook_plugins
from phyai.testing.conformance.check import Failure, NotApplicable, checks_of
from phyai.testing.conformance.requests import another, malformed, with_options
from phyai.testing.conformance.results import Arrays, arrays, other_bits, row_of, too_far
from phyai.testing.conformance.subject import Subject, result_of, step
from phyai.types import ActionChunk, Observation

KEEP = "Keep session data in buffers declared with session=True, and nothing of it on self."
TTL_S = 60.0


def session_repeats_a_stored_result(subject: Subject) -> None:
    """The same seq sent again gives the stored result, whatever else it holds."""
    first, other = _rows(subject)
    with subject.engine() as engine:
        result = result_of(engine, _at(first, "a", 0), "seq 0 of a session")
        want = arrays(result)
        for time in ("once", "twice"):
            _scribble(result)  # the caller may do that with its own arrays
            result = result_of(engine, _at(other, "a", 0), "seq 0 of a session sent again")
            if problem := other_bits(arrays(result), want):
                raise Failure(
                    f"a seq sent again {time} must give its stored result; {problem}. Let core's "
                    "session store answer it."
                )
        step(engine, _at(first, "a", 1), "seq 1 of a session after seq 0 was sent again")


def session_refuses_a_wrong_seq(subject: Subject) -> None:
    """A seq that is neither the last nor the next one is a RequestError; the next one works."""
    first, _ = _rows(subject)
    with subject.engine() as engine:
        step(engine, _at(first, "a", 0), "seq 0 of a session")
        for name, seq in (("a", 2), ("a", -1), ("a", "1"), ("", 0), ("a", None), (None, 1)):
            try:
                engine.step(_at(first, name, seq))
            except RequestError:
                continue
            raise Failure(
                f"session_id {name!r} with seq {seq!r} after seq 0 must be a RequestError; it ran. "
                "Put what phyai.sessions.session_rows returns into Prepared."
            )
        step(engine, _at(first, "a", 1), "seq 1 of a session after a refused one")


def sessions_stay_apart(subject: Subject) -> None:
    """Two sessions, in turn and in one batch, give what each gives alone; a new one is fresh."""
    first, other = _rows(subject)
    streams = {"a": [first, other, first], "b": [other, other, first]}
    alone: dict[str, list[Arrays]] = {}
    for name, stream in streams.items():
        with subject.engine() as engine:
            alone[name] = [step(engine, _at(row, name, seq)) for seq, row in enumerate(stream)]
    with subject.engine() as engine:
        for seq in range(3):
            for name, stream in streams.items():
                got = step(engine, _at(stream[seq], name, seq), f"seq {seq} of session {name!r}")
                if problem := other_bits(got, alone[name][seq]):
                    raise Failure(
                        f"seq {seq} of session {name!r} must not notice another session; {problem}."
                        f" {KEEP}"
                    )
        again = step(engine, _at(first, "c", 0), "seq 0 of a third session")
        if problem := other_bits(again, alone["a"][0]):
            raise Failure(f"a new session must start afresh; {problem}. {KEEP}")
        if subject.max_rows >= 2:
            _check_batches(subject, engine, streams, alone)


def requests_without_a_session_keep_nothing(subject: Subject) -> None:
    """A request without a session is the same beside sessions, and none comes of it."""
    first, other = _rows(subject)
    with subject.engine() as engine:
        want = step(engine, first)
        for seq in range(2):
            step(engine, _at(other, "a", seq), f"seq {seq} of a session")
            if problem := other_bits(step(engine, first), want):
                raise Failure(f"a request without a session must not notice one; {problem}. {KEEP}")
        live = engine.core.sessions.stats()["live"]
    if live != 1:
        raise Failure(f"a request without a session must not open one; {live} are live, not 1.")


def failed_request_leaves_its_session(subject: Subject) -> None:
    """After requests that are refused or blocked, the same seq gives what it gives without."""
    first, other = _rows(subject)
    stream = [first, other, first]
    with subject.engine() as engine:
        want = [step(engine, _at(row, "a", seq)) for seq, row in enumerate(stream)]
        blockable = isinstance(engine.step(_at(first, "b", 0)), ActionChunk)
    bad = _refused_rows(subject, other)
    blocker, manager = _Blocker(), load_hook_plugins()
    add_hooks(manager, blocker, "conformance-blocker")
    with subject.core(hooks=manager) as core:
        for seq, row in enumerate(stream):
            for broken in bad:
                _must_fail(core, _at(broken, "a", seq), RequestError)
            if blockable:
                blocker.armed = True
                for failing in (other, row):
                    _must_fail(core, _at(failing, "a", seq), ActionRejected)
                blocker.armed = False
            got = step(core, _at(row, "a", seq), f"seq {seq} of a session after it failed")
            if problem := other_bits(got, want[seq]):
                raise Failure(
                    f"a failed request must leave its session as it was; at seq {seq} {problem}. "
                    f"{KEEP}"
                )


def lost_sessions_are_told_and_start_afresh(subject: Subject) -> None:
    """Evicted, expired, closed and unknown sessions are four errors; seq 0 starts afresh."""
    first, other = _rows(subject)
    now = [0.0]
    with subject.engine(max_sessions=2, session_ttl_s=TTL_S) as engine:
        engine.core.sessions.clock = lambda: now[0]
        want = step(engine, _at(first, "a", 0))
        step(engine, _at(other, "a", 1))
        _must_be_lost(engine, _at(first, "never seen", 1), SessionUnknown)
        for name in ("b", "c"):
            step(engine, _at(other, name, 0))
        _must_be_lost(engine, _at(first, "a", 2), SessionEvicted)
        _check_fresh(engine, _at(first, "a", 0), want, "was evicted")
        engine.close_session("a")
        _must_be_lost(engine, _at(first, "a", 1), SessionClosed)
        _check_fresh(engine, _at(first, "a", 0), want, "was closed")
        engine.reset_session("a")
        _check_fresh(engine, _at(first, "a", 0), want, "was reset")
        now[0] += 2 * TTL_S
        _must_be_lost(engine, _at(first, "a", 1), SessionExpired)
        _check_fresh(engine, _at(first, "a", 0), want, "expired")


def sessions_on_recorded_graphs_equal_eager(subject: Subject) -> None:
    """The frames of two sessions give the same on recorded graphs, which run encode on trial."""
    first, other = _rows(subject)
    if "recorded" not in subject.given.backends:
        raise NotApplicable("back end recorded was not asked for")
    eager_config = subject.reference_config(static_shapes=True)
    with subject.recorded() as graphs, subject.core(eager_config) as eager:
        for seq, row in enumerate([first, other, first]):
            for name in ("a", "b"):
                request = _at(row, name, seq)
                want = step(eager, request)
                got = step(graphs, request, f"seq {seq} of session {name!r} on recorded graphs")
                if problem := other_bits(got, want):
                    raise Failure(
                        f"seq {seq} of session {name!r} must give the same on recorded graphs; "
                        f"{problem}. A replay runs no Python: count frames in a session buffer."
                    )


# ---------------------------------------------------------------- internals


def _rows(subject: Subject) -> tuple[Observation, Observation]:
    if not subject.capability("sessions"):
        raise NotApplicable("capabilities declare no sessions")
    row = subject.observation()
    return row, another(row, 41 if subject.takes_option("seed") else None)


def _at(row: Observation, session: str | None, seq: Any) -> Any:
    return with_options(row, session_id=session, seq=seq)


def _check_batches(
    subject: Subject,
    engine: Engine,
    streams: dict[str, list[Observation]],
    alone: dict[str, list[Arrays]],
) -> None:
    """Frames of both sessions in one request stay within the tolerance of batches."""
    for seq in range(3):
        names = list(streams)[:: 1 if seq % 2 else -1]
        batch = [_at(streams[name][seq], f"batch {name}", seq) for name in names]
        result = result_of(engine, batch, f"seq {seq} of two sessions in one request")
        for place, name in enumerate(names):
            got = row_of(result, place)
            if problem := too_far(got, alone[name][seq], subject.given.batch_tolerance):
                raise Failure(
                    f"seq {seq} of session {name!r} must be what it is alone beside another session"
                    f" in one request; {problem}. {KEEP}"
                )


class _Blocker:
    """Blocks every chunk while it is armed."""

    armed = False

    @hookimpl
    def phyai_validate_action(self, chunk: Any) -> str | None:
        return "the conformance kit blocks it" if self.armed else None


def _refused_rows(subject: Subject, row: Observation) -> Sequence[Observation]:
    """Return malformed rows that ``prepare`` is known to refuse."""
    options = subject.capability("options") or ()
    found = []
    for _, request, foreign in malformed(row, subject.max_rows, options):
        if foreign or not isinstance(request, Observation) or isinstance(request.options, list):
            continue
        try:
            subject.exact.adapter.prepare(request)
        except RequestError:
            found.append(request)
        except Exception:  # another check tells
            continue
    return found


def _must_fail(core: EngineCore, request: Any, kind: type[PhyaiError]) -> None:
    try:
        core.step(request)
    except kind:
        return
    raise Failure(
        f"a request of a session that has to fail must be a {kind.__name__}; it ran. Check it in "
        "prepare(), and keep results in ActionChunk."
    )


def _must_be_lost(engine: Engine, request: Any, kind: type[SessionLost]) -> None:
    try:
        engine.step(request)
    except SessionLost as error:
        if type(error) is not kind:
            raise Failure(
                f"a lost session must be told as {kind.__name__}; got {type(error).__name__}."
            ) from error
        return
    raise Failure(f"a lost session must be told as {kind.__name__}; its request ran.")


def _check_fresh(engine: Engine, request: Any, want: Arrays, how: str) -> None:
    if problem := other_bits(step(engine, request, f"seq 0 of a session that {how}"), want):
        raise Failure(f"a session that {how} must start afresh; {problem}. {KEEP}")


def _scribble(result: Any) -> None:
    """Overwrite the arrays of a chunk."""
    if isinstance(result, ActionChunk):
        for array in (result.actions, result.model_actions):
            if array.flags.writeable:
                array[...] = -1.0


_NEEDS = ("l0_can_be_selected", "l1_loads")
CHECKS = checks_of(
    3,
    (
        session_repeats_a_stored_result,
        session_refuses_a_wrong_seq,
        sessions_stay_apart,
        requests_without_a_session_keep_nothing,
        failed_request_leaves_its_session,
        lost_sessions_are_told_and_start_afresh,
        sessions_on_recorded_graphs_equal_eager,
    ),
    _NEEDS,
)
