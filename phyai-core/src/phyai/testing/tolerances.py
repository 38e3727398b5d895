"""How far results of one model may lie apart, and why."""

from __future__ import annotations

REFERENCE_ATOL = 1e-4
"""float32 on the CPU against a reference: another order of sums over a whole network."""

BATCH_ATOL = 1e-4
"""A row alone against the row in a batch of another bucket: other shapes take other code paths of
the matrix library, which round differently."""

PRECISION_COSINE = 0.9
"""A reduced precision against float32, per row: far from right catches a wrong cast or scale."""

KNOWN_ATOL = 1e-5
"""Actions that are given (trained RTC): copied, but perhaps normalised and back."""
