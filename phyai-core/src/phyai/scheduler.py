"""Picks the batch bucket a request runs in; topology and joining have their place here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Bucket choice of one replica.

    static_shapes: graphs need fixed shapes, so rows are padded to a power of two (or to
    max_rows); without graphs a batch runs at its own size and no padding row is computed.

    >>> Scheduler(max_rows=6, static_shapes=True).batch_bucket(3)
    4
    """

    max_rows: int
    static_shapes: bool = False

    def batch_bucket(self, rows: int) -> int:
        if not self.static_shapes:
            return rows
        bucket = 1
        while bucket < rows:
            bucket *= 2
        return min(bucket, self.max_rows)
