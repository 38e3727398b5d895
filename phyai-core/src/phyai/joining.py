"""Several prepared requests as one batch, and the batch's result as one per request again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from phyai.errors import CapacityError, PluginContractError, RequestError
from phyai.memory import is_out_of_memory
from phyai.session_options import observations_of, of_batch
from phyai.types import Observation, Prepared


class NotRowsFirst(PluginContractError):
    """A model-space result that cannot be given back to the requests that shared a batch."""


ALONE_AGAIN = (RequestError, CapacityError, NotRowsFirst)
"""What a joined batch may fail with where each of its requests alone need not: one of them is bad,
or was closed meanwhile, or they have no room together."""


def runs_alone(error: BaseException) -> bool:
    """Return whether the requests of a joined batch that failed so are each run again, alone."""
    return isinstance(error, ALONE_AGAIN) or is_out_of_memory(error)


@dataclass(frozen=True, slots=True)
class Failed:
    """What a request of a batch got instead of a result, while others may have got theirs.

    >>> Failed(RuntimeError("NaN")).error
    RuntimeError('NaN')
    """

    error: BaseException


def may_join(one: Prepared, other: Prepared) -> bool:
    """Return whether two requests may share a batch, rows and sessions aside.

    Equal keys, tensors of the same names, dtypes and row shapes, and the same kind of result.

    >>> import torch
    >>> from phyai.types import Key, Prepared
    >>> one, two = (Prepared({"state": torch.zeros(n, 4)}, n, Key()) for n in (1, 2))
    >>> may_join(one, two), may_join(one, Prepared(two.tensors, 2, Key(num_steps=5)))
    (True, False)
    """
    return (
        _joins_any(one)
        and _joins_any(other)
        and one.key == other.key
        and (one.meta is None) == (other.meta is None)
        and _layout(one) == _layout(other)
    )


def _joins_any(batch: Prepared) -> bool:
    # What is not as the contract wants it goes alone, so that its error is its own.
    return (
        type(batch) is Prepared
        and batch.joinable
        and all(isinstance(t, Tensor) and t.shape[:1] == (batch.rows,) for t in _values(batch))
        and (batch.meta is None or len(batch.meta) == batch.rows)
        and all(
            named is None or len(named) == batch.rows for named in (batch.session_ids, batch.seqs)
        )
    )


def _values(batch: Prepared) -> Sequence[Any]:
    return list(batch.tensors.values())


def _layout(batch: Prepared) -> dict[str, Any]:
    return {name: (t.shape[1:], t.dtype, t.device) for name, t in batch.tensors.items()}


def joined(batches: Sequence[Prepared]) -> Prepared:
    """Return one batch with the rows of all, in order; a lone one as it is.

    >>> import torch
    >>> from phyai.types import Key, Prepared
    >>> two = [Prepared({"state": torch.full((1, 1), v)}, 1, Key()) for v in (3.0, 4.0)]
    >>> joined(two).tensors["state"].tolist()
    [[3.0], [4.0]]
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    names = [of_batch(batch) for batch in batches]
    named = any(batch.session_ids is not None for batch in batches)
    return replace(
        first,
        tensors={n: torch.cat([b.tensors[n] for b in batches]) for n in first.tensors},
        rows=sum(batch.rows for batch in batches),
        meta=None if first.meta is None else tuple(chain(*(b.meta or () for b in batches))),
        session_ids=tuple(chain(*(ids for ids, _ in names))) if named else None,
        seqs=tuple(chain(*(seqs for _, seqs in names))) if named else None,
    )


def row_ranges(batches: Sequence[Prepared]) -> list[slice]:
    """Return which rows of the joined batch belong to each request."""
    ends = list(accumulate(batch.rows for batch in batches))
    return [slice(end - batch.rows, end) for end, batch in zip(ends, batches, strict=True)]


def part_of(result: Any, rows: slice, total: int) -> Any:
    """Return the rows of one request out of a batch's result, in memory of their own.

    Raises: NotRowsFirst when a tensor does not have the batch's ``total`` rows first.

    >>> import torch
    >>> part_of({"a": torch.tensor([1, 2, 3])}, slice(1, 3), 3)
    {'a': tensor([2, 3])}
    """
    if isinstance(result, Mapping):
        return {name: part_of(value, rows, total) for name, value in result.items()}
    if isinstance(result, Tensor) and result.ndim and result.shape[0] == total:
        return result[rows].clone()
    if isinstance(result, list) and len(result) == total:
        return result[rows]
    raise NotRowsFirst(
        f"a result that requests share must have one row per robot ({total}); got "
        f"{type(result).__name__}. Return a tensor [B, ...] or a mapping of them, or give Prepared "
        "joinable=False."
    )


# ---------------------------------------------------------------- the deadline of a request


def deadline_s(request: Any) -> float | None:
    """Return the seconds a request has left when it is submitted, None without a deadline.

    The least of its rows. Raises: RequestError for a deadline that is no finite number.

    >>> from phyai.types import Observation
    >>> deadline_s([Observation(options={"deadline": 0.5}), Observation()])
    0.5
    """
    found = [row.options.get("deadline") for row in observations_of(request)]
    left = [value for value in found if value is not None]
    for value in left:
        if isinstance(value, bool) or not isinstance(value, Real) or not _finite(value):
            raise RequestError(
                f"option 'deadline' must be a number of seconds from now; got {value!r}. Send the "
                "time that is left."
            )
    return min(map(float, left), default=None)


def with_deadline(request: Any, seconds: float) -> Any:
    """Return an Observation request with that many seconds left, or fewer where a row says so.

    >>> from phyai.types import Observation
    >>> with_deadline(Observation(), 0.25).options
    {'deadline': 0.25}
    """
    rows = observations_of(request)
    if not rows:
        return request
    own = deadline_s(request)
    left = seconds if own is None else min(own, seconds)
    timed = [replace(row, options={**row.options, "deadline": left}) for row in rows]
    return timed[0] if isinstance(request, Observation) else timed


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer no float can hold
        return False


def without_deadline(request: Any) -> Any:
    """Return the request as the adapter sees it: deadlines are core's alone."""
    rows = observations_of(request)
    if all("deadline" not in row.options for row in rows):
        return request
    bare = [
        replace(row, options={k: v for k, v in row.options.items() if k != "deadline"})
        for row in rows
    ]
    return bare[0] if isinstance(request, Observation) else bare
