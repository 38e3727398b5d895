"""Tests of PhyAI; a package, so that `tests.golden_cases` and its like have one importable name."""
