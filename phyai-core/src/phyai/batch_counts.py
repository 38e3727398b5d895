"""Counts of the batches one core ran."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class BatchCounts:
    """How many batches ran, how many requests shared them, and how long they took.

    >>> from phyai.batch_counts import BatchCounts
    >>> counts = BatchCounts()
    >>> with counts.running(requests=2, rows=3):
    ...     pass
    >>> counts.as_dict()
    {'count': 1, 'requests': 2, 'joined': 2, 'rows': {3: 1}}
    """

    def __init__(self) -> None:
        self.count = self.requests = self.joined = 0
        self.rows: Counter[int] = Counter()
        # Seconds of the batches before this one, and since when this one runs; read as one.
        self._busy: tuple[float, float | None] = 0.0, None

    @contextmanager
    def running(self, requests: int, rows: int) -> Iterator[None]:
        """Count the batch that runs inside, also when it fails; one at a time."""
        self.count += 1
        self.requests += requests
        self.joined += requests if requests > 1 else 0
        self.rows[rows] += 1
        before, began = self._busy[0], time.perf_counter()
        self._busy = before, began
        try:
            yield
        finally:
            self._busy = before + time.perf_counter() - began, None

    @property
    def busy_s(self) -> float:
        """Seconds in which the model ran; its rate is the busy share."""
        before, began = self._busy
        return before if began is None else before + time.perf_counter() - began

    def as_dict(self) -> dict[str, Any]:
        """Return count, requests, joined (requests that shared a batch), rows: size -> batches."""
        rows = dict(sorted(self.rows.copy().items()))
        return {
            "count": self.count,
            "requests": self.requests,
            "joined": self.joined,
            "rows": rows,
        }
