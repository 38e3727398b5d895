"""Runs checks in order and shows how they ended: a table for people, JSON for tools."""

from __future__ import annotations

import fnmatch
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phyai.testing.conformance import CHECKS, MAX_LEVEL
from phyai.testing.conformance.check import Check, Outcome, run_check
from phyai.testing.conformance.subject import Subject

_LEVELS = ("package", "load", "numerics", "serving")
_SHOWN = {"passed": "pass", "failed": "FAIL", "not-applicable": "n/a", "not-run": "not run"}


class Run:
    """The checks of one subject; remembers how each ended.

    >>> from phyai.testing.conformance.check import Check
    >>> from phyai.testing.conformance.report import Run
    >>> first = Check(0, "l0_first", lambda subject: 1 / 0)
    >>> second = Check(1, "l1_second", lambda subject: None, needs=("l0_first",))
    >>> run = Run(None, (first, second))
    >>> [run.outcome(check).status for check in (first, second)]
    ['failed', 'not-run']
    """

    def __init__(self, subject: Subject, checks: Sequence[Check] = CHECKS) -> None:
        self.subject = subject
        self.checks = {check.name: check for check in checks}
        self.outcomes: dict[str, Outcome] = {}

    def outcome(self, check: Check) -> Outcome:
        """Return how a check ended; runs it, and first what it needs, unless that is known."""
        if check.name not in self.outcomes:
            failed = [
                name
                for name in check.needs
                if name in self.checks and self.outcome(self.checks[name]).status != "passed"
            ]
            self.outcomes[check.name] = (
                Outcome(check.level, check.name, "not-run", f"{failed[0]} did not pass")
                if failed
                else run_check(check, self.subject)
            )
        return self.outcomes[check.name]

    def failed_needs(self, check: Check) -> list[Outcome]:
        """Return the failures among the checks that this one needs, as far as they ran."""
        known = [self.outcomes[name] for name in check.needs if name in self.outcomes]
        return [outcome for outcome in known if outcome.status == "failed"]


def run_checks(
    subject: Subject,
    *,
    level: int = MAX_LEVEL,
    only: Sequence[str] = ("*",),
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Return the outcome of every check up to ``level`` whose name matches one of ``only``.

    A check that was left out, but whose failure kept another from running, comes before that one.
    done: called after each one.
    """
    run = Run(subject)
    outcomes: list[Outcome] = []
    for check in CHECKS:
        if check.level <= level and any(fnmatch.fnmatch(check.name, glob) for glob in only):
            outcome = run.outcome(check)
            for each in (*run.failed_needs(check), outcome):
                if each not in outcomes:
                    outcomes.append(each)
                    done(each)
    return outcomes


def all_passed(outcomes: Sequence[Outcome]) -> bool:
    """Return whether none failed, and at least one passed."""
    statuses = {outcome.status for outcome in outcomes}
    return "passed" in statuses and not statuses & {"failed", "not-run"}


def line(outcome: Outcome) -> str:
    """Return the row of the table; a failure is followed by why and what to do."""
    shown = _SHOWN[outcome.status]
    head = f"{shown:<8} {outcome.name:<42} {outcome.seconds:7.2f} s"
    if not outcome.message:
        return head
    if outcome.status != "failed":
        return f"{head}  {outcome.message}"
    return f"{head}\n{textwrap.indent(textwrap.fill(outcome.message, 90), ' ' * 9)}"


def heading(level: int) -> str:
    return f"Level {level}: {_LEVELS[level]}"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the last line of the table."""
    parts = []
    for status, word in (
        ("passed", "passed"),
        ("failed", "failed"),
        ("not-run", "not run"),
        ("not-applicable", "do not apply"),
    ):
        if count := sum(outcome.status == status for outcome in outcomes):
            parts.append(f"{count} {word}")
    return f"{len(outcomes)} checks: {', '.join(parts)}."


def as_json(subject: Subject, level: int, outcomes: Sequence[Outcome]) -> Mapping[str, Any]:
    """Return the report as JSON types."""
    found = next((o for o in outcomes if o.name == "l0_can_be_selected"), None)
    known = found is None or found.status == "passed"
    record = subject.record if known else None
    return {
        "plugin": subject.plugin,
        "dist": record.dist if record else None,
        "version": record.version if record else None,
        "level": level,
        "ok": all_passed(outcomes),
        "summary": summary(outcomes),
        "checks": [
            {
                "level": outcome.level,
                "name": outcome.name,
                "status": outcome.status,
                "message": outcome.message,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ],
    }
