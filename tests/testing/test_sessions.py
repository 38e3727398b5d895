"""The kit's session checks pass a correct policy with sessions, and catch every mutant of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from phyai.testing.conformance import sessions
from phyai.testing.conformance.check import Outcome
from phyai.testing.conformance.report import run_checks
from phyai.testing.conformance.subject import Given, Subject
from phyai.testing.sandbox import Sandbox
from phyai.types import Observation
from tests.testing import policies
from tests.testing.mutants_sessions import ALL, MUTANTS
from tests.testing.policies import Mutant

PACKAGE, PLUGIN = "session_policy", "toy_session"


def outcomes(
    sandbox: Sandbox, mutant: Mutant | None, only: Sequence[str], **given: Any
) -> list[Outcome]:
    """Return how the checks end on the session policy, or on a mutant of it."""
    policies.install(sandbox, mutant, package=PACKAGE, plugin=PLUGIN)
    samples = [Observation(state=np.array(row, np.float32)) for row in ([1, 2, 3], [0.5, -1, 4])]
    with sandbox.visible():
        subject = Subject(Given(PLUGIN, sample_requests=samples, **given))
        try:
            return run_checks(subject, only=only)
        finally:
            subject.close()


def test_the_correct_policy_passes(phyai_sandbox: Sandbox) -> None:
    assert [check.name for check in sessions.CHECKS] == list(ALL)
    ends = outcomes(phyai_sandbox, None, ("l0_capa*", "l1_loads", "l2_*", *ALL))
    failed = {o.name: o.message for o in ends if o.status not in ("passed", "not-applicable")}
    assert failed == {}
    assert {o.name for o in ends if o.status == "passed"} >= {*ALL, "l2_requests_succeed"}


def test_plugins_without_sessions_are_not_checked(phyai_sandbox: Sandbox) -> None:
    without = Mutant("plugin", (('            "sessions": True,\n', ""),), "", "")
    ends = outcomes(phyai_sandbox, without, ALL)
    assert {o.status for o in ends} == {"not-applicable"}
    assert "declare no sessions" in ends[0].message


@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_is_caught(name: str, phyai_sandbox: Sandbox) -> None:
    mutant = MUTANTS[name]
    (end,) = outcomes(phyai_sandbox, mutant, (mutant.caught,))
    assert end.status == "failed"
    assert mutant.message in end.message


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_breaks_what_it_should_and_nothing_else(name: str, phyai_sandbox: Sandbox) -> None:
    mutant = MUTANTS[name]
    failed = {
        o.name: o.message for o in outcomes(phyai_sandbox, mutant, ALL) if o.status == "failed"
    }
    assert mutant.message in failed[mutant.caught]
    assert set(failed) == {mutant.caught, *mutant.also}, failed


def test_every_check_catches_some_mutant() -> None:
    caught = {name for mutant in MUTANTS.values() for name in (mutant.caught, *mutant.also)}
    assert caught == set(ALL)
