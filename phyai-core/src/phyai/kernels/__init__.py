"""Ops with interchangeable implementations: a torch reference each, faster rows where they fit."""

from __future__ import annotations

from phyai.kernels.autotune import Autotuner, Candidate
from phyai.kernels.catalogue import CATALOGUE
from phyai.kernels.policy import KernelPolicy, load_policy, parse_policy
from phyai.kernels.reference import MASK_VALUE
from phyai.kernels.registry import KernelTable
from phyai.kernels.rows import (
    FLOATS,
    GENERAL,
    OPTIMIZED,
    REFERENCE,
    SPECIALIZED,
    Choice,
    Kernel,
    KernelRow,
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
    "Autotuner",
    "Candidate",
    "Choice",
    "Kernel",
    "KernelPolicy",
    "KernelRow",
    "KernelTable",
    "Predicate",
    "load_policy",
    "parse_policy",
]
