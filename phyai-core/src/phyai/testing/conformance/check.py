"""One check: what it is called, which ones must hold before it, and how it ends."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from phyai.testing.conformance.subject import Subject

Status = Literal["passed", "failed", "not-applicable", "not-run"]


class Failure(AssertionError):
    """A rule is broken; the message says which, what was seen and what to do."""


class NotApplicable(Exception):
    """The plugin declares nothing this check could look at; the message says what is absent."""


@dataclass(frozen=True, slots=True)
class Check:
    """A named rule of one level.

    run: raises Failure or NotApplicable.  needs: names of checks; when one fails this is not run.

    >>> from phyai.testing.conformance.check import checks_of
    >>> def rows_stay_apart(subject):
    ...     "Rows do not mix. More text."
    >>> (check,) = checks_of(2, [rows_stay_apart])
    >>> check.name, check.summary
    ('l2_rows_stay_apart', 'Rows do not mix.')
    """

    level: int
    name: str
    run: Callable[[Subject], None]
    needs: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        text = " ".join((self.run.__doc__ or "").split())
        return re.split(r"(?<=\.)\s", text)[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one check ended; ``message`` says why unless it passed."""

    level: int
    name: str
    status: Status
    message: str = ""
    seconds: float = 0.0
    traceback: str = ""


def checks_of(
    level: int, functions: Sequence[Callable[[Subject], None]], needs: tuple[str, ...] = ()
) -> tuple[Check, ...]:
    """Return the checks of some functions, named ``l<level>_<function>``."""
    return tuple(
        Check(level, f"l{level}_{function.__name__}", function, needs) for function in functions
    )


def run_check(check: Check, subject: Subject) -> Outcome:
    """Run one check; whatever it raises becomes its outcome, except an interruption."""
    started = time.perf_counter()
    status: Status = "passed"
    message = trace = ""
    try:
        check.run(subject)
    except NotApplicable as reason:
        status, message = "not-applicable", str(reason)
    except Failure as failure:
        status, message = "failed", str(failure)
        if (
            failure.__cause__ is not None
        ):  # what the plugin raised; the kit's own frames say nothing
            trace = "".join(traceback.format_exception(failure.__cause__))
    except Exception as error:
        status, trace = "failed", traceback.format_exc()
        message = f"{type(error).__name__}: {error}"
    return Outcome(check.level, check.name, status, message, time.perf_counter() - started, trace)
