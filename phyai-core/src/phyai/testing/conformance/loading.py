"""Level 1: the checkpoint is loaded strictly, as often as wanted, and let go."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from phyai.engine_core import EngineCore
from phyai.errors import CheckpointError, EngineUnavailableError, PhyaiError
from phyai.testing.conformance import checkpoint
from phyai.testing.conformance.check import Failure, checks_of
from phyai.testing.conformance.checkpoint import Change, find_checkpoint, is_named
from phyai.testing.conformance.results import other_bits
from phyai.testing.conformance.subject import Subject, step

_STRICT = "Load with phyai.weights.load_pretrained(..., strict=True)."


def loads(subject: Subject) -> None:
    """The tiny checkpoint loads and the engine is ready."""
    try:
        assert subject.exact.adapter is not None
    except PhyaiError as error:
        raise Failure(f"the engine must start; got {type(error).__name__}: {error}") from error


def dropped_tensor_is_named(subject: Subject) -> None:
    """A checkpoint without one tensor is refused, and the error names the tensor."""
    _refused(subject, checkpoint.dropped, "without tensor")


def extra_tensor_is_named(subject: Subject) -> None:
    """A checkpoint with a tensor nobody asked for is refused, and the error names it."""
    _refused(subject, checkpoint.extra, "with the unknown tensor")


def renamed_tensor_is_named(subject: Subject) -> None:
    """A renamed tensor is refused, and the error holds the old and the new name."""
    _refused(subject, checkpoint.renamed, "with a renamed tensor,")


def misshaped_tensor_is_named(subject: Subject) -> None:
    """A tensor of another shape is refused, and the error names it."""
    _refused(subject, checkpoint.misshaped, "with another shape of")


def absent_checkpoint_is_a_typed_error(subject: Subject) -> None:
    """A folder that is not there gives an error of phyai.errors that names the folder."""
    found = find_checkpoint(subject.args, _loaded(subject))
    with tempfile.TemporaryDirectory() as folder:
        missing = Path(folder) / "no-such-checkpoint"
        args = _replaced(subject.args, found.field, missing)
        message = _start_error(subject, args, f"a checkpoint folder that is not there ({missing})")
    if missing.name not in message:
        raise Failure(
            f"the error for a folder that is not there must name it; got {message!r}. Resolve it "
            "with phyai.hub.resolve."
        )


def loads_twice(subject: Subject) -> None:
    """Two engines live side by side and give the same bits."""
    request = subject.requests[0]
    want = subject.solo(0)
    with subject.core() as second:
        got = step(second, request, "a request of a second engine")
        if problem := other_bits(got, want):
            raise Failure(
                f"a second engine over the same checkpoint must give the same result; {problem}. "
                "Keep nothing on classes or modules, and seed whatever is drawn in load()."
            )
        if problem := other_bits(subject.solo(0), want):
            raise Failure(
                f"the first engine must not notice a second one; {problem}. Keep nothing on "
                "classes or modules."
            )


def closes_twice(subject: Subject) -> None:
    """Closing twice is fine, a request afterwards is refused, and another engine still works."""
    core = subject.open()
    adapter = core.adapter
    core.close()
    for what, close in (("engine", core.close), ("adapter", adapter.close)):
        try:
            close()
        except Exception as error:
            raise Failure(
                f"close() of the {what} must be harmless when called again; got "
                f"{type(error).__name__}: {error}. Forget what was released."
            ) from error
    try:
        core.step(subject.requests[0])
    except EngineUnavailableError:
        pass
    else:
        raise Failure("a closed engine must refuse requests; it ran one.")
    step(subject.exact, subject.requests[0], "a request after another engine was closed")


def _refused(subject: Subject, change: Change, what: str) -> None:
    found = find_checkpoint(subject.args, _loaded(subject))
    with tempfile.TemporaryDirectory() as folder:
        args, names = found.broken(subject.args, Path(folder) / "copy", change)
        label = f"a checkpoint {what} {names[0]!r}"
        message = _start_error(subject, args, label)
    absent = [name for name in names if not is_named(name, message)]
    if absent:
        raise Failure(f"the error for {label} must name {absent[0]!r}; got {message!r}. {_STRICT}")


def _start_error(subject: Subject, args: Any, label: str) -> str:
    """Return the message of the CheckpointError that starting with ``args`` must raise."""
    try:
        core: EngineCore = subject.open(args=args)
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        raise Failure(
            f"{label} must give a CheckpointError; got {type(error).__name__}: {error}. {_STRICT}"
        ) from error
    core.close()
    raise Failure(f"{label} must be refused; it was loaded. {_STRICT}")


def _loaded(subject: Subject) -> tuple[str, ...]:
    report = subject.exact.load_report
    return () if report is None else report.loaded


def _replaced(args: Any, field: str, value: Path) -> Any:
    return dataclasses.replace(args, **{field: str(value)})


_NEEDS = ("l0_can_be_selected",)
CHECKS = (
    *checks_of(1, (loads,), _NEEDS),
    *checks_of(
        1,
        (
            dropped_tensor_is_named,
            extra_tensor_is_named,
            renamed_tensor_is_named,
            misshaped_tensor_is_named,
            absent_checkpoint_is_a_typed_error,
        ),
        (*_NEEDS, "l1_loads"),
    ),
    # They compare results, so that a request has to work.
    *checks_of(1, (loads_twice, closes_twice), (*_NEEDS, "l1_loads", "l2_requests_succeed")),
)
