"""Checks of what a batch gave, request by request: nothing bad leaves the runtime unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from phyai.errors import ActionRejected
from phyai.types import ActionChunk

if TYPE_CHECKING:
    from phyai.types import Tensors

Validators: TypeAlias = Sequence[tuple[str, Callable[[Any], Any]]]


def not_finite(x: Tensors, parts: Sequence[slice]) -> dict[int, ActionRejected]:
    """Return the errors of the requests (rows ``parts`` of x) that hold NaN or infinity.

    Their rows are set to zero, so that the others can be decoded; no operation mixes rows.
    """
    found: dict[int, ActionRejected] = {}
    for leaf, tensor in x.items():
        if bool(tensor.isfinite().all()):
            continue
        for number, rows in enumerate(parts):
            if not bool(tensor[rows].isfinite().all()):
                tensor[rows] = 0
                found.setdefault(
                    number,
                    ActionRejected(
                        f"result {leaf!r} must be finite; got NaN or infinity. Check the "
                        "checkpoint and the inputs of this request."
                    ),
                )
    return found


def check_chunks(results: Sequence[Any], validators: Validators) -> None:
    """Raise ActionRejected for a chunk nobody may execute; what is no chunk passes."""
    for chunk in results:
        if isinstance(chunk, ActionChunk):
            _check_chunk(chunk, validators)


def _check_chunk(chunk: ActionChunk, validators: Validators) -> None:
    if not np.isfinite(chunk.actions).all():
        raise ActionRejected(
            "actions must be finite in robot units; got NaN or infinity. Check the "
            "checkpoint's statistics."
        )
    guarded = _read_only(chunk) if validators else chunk
    for name, validator in validators:
        try:
            problem = validator(guarded)
        except (Exception, SystemExit) as error:
            raise ActionRejected(
                f"validator {name!r} raised {type(error).__name__}: {error}. "
                "The chunk was blocked.",
                validator=name,
            ) from error
        if problem:
            raise ActionRejected(f"validator {name!r} blocked the chunk: {problem}", validator=name)


def _read_only(chunk: ActionChunk) -> ActionChunk:
    """Return the chunk over the same memory, for eyes only: what is judged must not change."""
    views = {name: getattr(chunk, name).view() for name in ("actions", "mask", "model_actions")}
    for view in views.values():
        view.flags.writeable = False
    return replace(chunk, **views)
