"""The conformance kit: checks of an adapter package at four levels.

0 package, 1 load, 2 numerics, 3 serving. ``CHECKS`` is all of them in order, each a plain function
of a ``Subject``; ``phyai.testing.AdapterConformance`` and ``python -m phyai.testing`` run them.
"""

from __future__ import annotations

from phyai.testing.conformance import (
    graphs,
    loading,
    numerics,
    package,
    rows,
    serving,
    sessions,
)
from phyai.testing.conformance.check import Check

CHECKS: tuple[Check, ...] = (
    *package.CHECKS,
    *loading.CHECKS,
    *numerics.CHECKS,
    *rows.CHECKS,
    *graphs.CHECKS,
    *serving.CHECKS,
    *sessions.CHECKS,
)
MAX_LEVEL = 3
