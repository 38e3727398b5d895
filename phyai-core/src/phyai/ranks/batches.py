"""A batch as it is told to all ranks, and what its requests' callers get on a rank that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phyai.errors import RequestError
from phyai.joining import Failed
from phyai.request_job import dressed, exits
from phyai.types import Prepared


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that run as one.

    tickets: their numbers; lone: one Observation, not a sequence; stoppable: some may be stopped.
    """

    tickets: tuple[int, ...]
    lone: tuple[bool, ...]
    requests: tuple[Prepared, ...]
    stoppable: bool = False


def check_sessions(batch: Batch, world: int) -> None:
    """Raise RequestError for rows of a session: it would live on rank 0 alone."""
    if any(name is not None for one in batch.requests for name in one.session_ids or ()):
        raise RequestError(
            f"option 'session_id' needs a replica of one rank; got one of {world} ranks. Send the "
            "request without it."
        )


def for_callers(
    batch: Batch, results: Sequence[Any], stages: Mapping[str, float], plugin: str
) -> list[Any]:
    """Return the outcome of each request as ``Job`` gives it on rank 0."""
    return [
        failed(result.error, plugin)
        if isinstance(result, Failed)
        else result
        if request.meta is None
        else dressed(result, stages, {}, lone=lone)
        for result, request, lone in zip(results, batch.requests, batch.lone, strict=True)
    ]


def failed(error: BaseException, plugin: str) -> Failed:
    """Return what a caller gets for an error: never the end of its process."""
    if isinstance(error, SystemExit):
        return Failed(exits(plugin, error, "a request ran"))
    return Failed(error)
