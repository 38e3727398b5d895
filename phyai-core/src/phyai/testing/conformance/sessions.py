"""Level 3: sessions, for plugins that declare them."""

from __future__ import annotations

from typing import Any

from phyai.errors import RequestError
from phyai.testing.conformance.check import Failure, NotApplicable, checks_of
from phyai.testing.conformance.requests import another, with_options
from phyai.testing.conformance.results import other_bits
from phyai.testing.conformance.subject import Subject, step
from phyai.types import Observation


def session_repeats_a_stored_result(subject: Subject) -> None:
    """The same seq sent again gives the stored result, whatever else it holds."""
    first, other = _rows(subject)
    with subject.engine() as engine:
        want = step(engine, _at(first, "a", 0), "seq 0 of a session")
        got = step(engine, _at(other, "a", 0), "seq 0 of a session sent again")
    if problem := other_bits(got, want):
        raise Failure(
            f"a seq sent again must give its stored result; {problem}. Let core's session store "
            "answer it."
        )


def session_refuses_a_wrong_seq(subject: Subject) -> None:
    """A seq that is neither the last nor the next one is a RequestError; the next one works."""
    first, _ = _rows(subject)
    with subject.engine() as engine:
        step(engine, _at(first, "a", 0), "seq 0 of a session")
        for seq in (2, -1):
            try:
                engine.step(_at(first, "a", seq))
            except RequestError:
                continue
            raise Failure(f"seq {seq} after seq 0 must be a RequestError; it ran.")
        step(engine, _at(first, "a", 1), "seq 1 of a session after a refused one")


def sessions_stay_apart(subject: Subject) -> None:
    """Two interleaved sessions give what each gives alone, and a new one starts afresh."""
    first, other = _rows(subject)
    streams = {"a": [first, other, first], "b": [other, other, first]}
    alone = {}
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
                        " Keep session data in buffers declared with session=True."
                    )
        again = step(engine, _at(first, "c", 0), "seq 0 of a third session")
        if problem := other_bits(again, alone["a"][0]):
            raise Failure(f"a new session must start afresh; {problem}.")


def _rows(subject: Subject) -> tuple[Observation, Observation]:
    if not subject.capability("sessions"):
        raise NotApplicable("capabilities declare no sessions")
    row = subject.observation()
    return row, another(row, 41 if subject.takes_option("seed") else None)


def _at(row: Observation, session: str, seq: int) -> Any:
    return with_options(row, session_id=session, seq=seq)


_NEEDS = ("l0_can_be_selected", "l1_loads")
CHECKS = checks_of(
    3,
    (session_repeats_a_stored_result, session_refuses_a_wrong_seq, sessions_stay_apart),
    _NEEDS,
)
