"""Each mutant of a correct policy is caught by the check that is named for it, for that reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from phyai.testing.conformance import CHECKS
from phyai.testing.conformance.report import run_checks
from phyai.testing.conformance.subject import Given, Subject
from phyai.testing.sandbox import Sandbox
from tests.testing import mutants_sessions, policies
from tests.testing.mutants import MUTANTS
from tests.testing.policies import Mutant


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    policies.checkpoint(folder)
    return policies.golden_set(folder, policies.reference(folder))


SLOW = {
    "memory that grows",
    "host memory that grows",
    "another result in a worker",
    "noise that is kept",
}
"""Seconds each, for another reason of a check that is tested in the default tier."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MUTANTS]
)
def test_mutant_is_caught(name: str, weights: Path, phyai_sandbox: Sandbox) -> None:
    mutant = MUTANTS[name]
    failed = failures(mutant, weights, phyai_sandbox, (mutant.caught,))
    assert set(failed) == {mutant.caught}
    assert mutant.message in failed[mutant.caught]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutant_breaks_what_it_should_and_nothing_else(
    name: str, weights: Path, phyai_sandbox: Sandbox
) -> None:
    mutant = MUTANTS[name]
    failed = failures(mutant, weights, phyai_sandbox, mutant.only)
    by_chance = set(mutant.maybe)
    assert mutant.message in failed[mutant.caught]
    assert set(failed) - by_chance == {mutant.caught, *mutant.also} - by_chance, failed


def failures(
    mutant: Mutant, weights: Path, sandbox: Sandbox, only: tuple[str, ...]
) -> dict[str, str]:
    """Return the message of every check that fails on a mutant."""
    policies.install(sandbox, mutant)
    if mutant.caught.startswith("l0_"):
        (sandbox.folder / "torch.py").touch()  # what a fresh interpreter imports, at once
    with sandbox.visible():
        subject = Subject(
            Given(
                policies.PLUGIN,
                tiny_checkpoint=str(weights),
                sample_requests=policies.requests(),
                golden_dir=weights,
                reference=policies.reference(weights),
            )
        )
        try:
            outcomes = run_checks(subject, only=only)
        finally:
            subject.close()
    return {o.name: o.message for o in outcomes if o.status == "failed"}


def test_there_are_enough_mutants_and_no_check_is_spared() -> None:
    """Every check that can fail on a CPU is the one that catches some mutant."""
    caught = {mutant.caught for mutant in MUTANTS.values()}
    others = {name for mutant in MUTANTS.values() for name in mutant.also}
    elsewhere = {
        "l0_can_be_selected",  # tested in test_kit
        "l0_entry_point_is_installed",
        "l0_hook_modules_import_no_torch",
        "l1_loads",
        "l2_compiled_regions_equal_eager",  # need a compiler, a GPU
        "l2_cuda_graphs_equal_eager",
        "l2_requests_pass_by_pluggy",  # core's own duty: test_kit breaks core
        *mutants_sessions.ALL,  # test_sessions
    }
    assert len(MUTANTS) >= 10
    assert {check.name for check in CHECKS} - elsewhere - caught - others == set()
