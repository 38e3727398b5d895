"""Which part of the gateway a process is, where several serve the same ports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Which of how many processes this one is."""

    index: int = 0
    count: int = 1

    @property
    def many(self) -> bool:
        return self.count > 1

    @property
    def first(self) -> bool:
        return self.index == 0

    def slots(self, found: int) -> int:
        """Return how much of what a backend holds is this process's.

        >>> Share(0, 4).slots(10)
        2
        """
        return max(found // self.count, 1)
