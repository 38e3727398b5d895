"""Ops with interchangeable implementations: a torch reference each, faster rows where they fit."""

from __future__ import annotations

from phyai.kernels.catalogue import CATALOGUE
from phyai.kernels.reference import MASK_VALUE
from phyai.kernels.registry import (
    FLOATS,
    GENERAL,
    OPTIMIZED,
    REFERENCE,
    SPECIALIZED,
    Choice,
    KernelRow,
    KernelTable,
    Predicate,
)

__all__ = [
    "CATALOGUE",
    "FLOATS",
    "GENERAL",
    "MASK_VALUE",
    "OPTIMIZED",
    "REFERENCE",
    "SPECIALIZED",
    "Choice",
    "KernelRow",
    "KernelTable",
    "Predicate",
]
