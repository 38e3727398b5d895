"""docs/performance.md shows what benchmarks/figures.py computes."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_holds_the_computed_tables() -> None:
    figures = runpy.run_path(str(ROOT / "benchmarks/figures.py"))
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert figures["renewed"](page) == page, "run: python benchmarks/figures.py --write"
    for picture in ("operations.png", "control_time.png"):
        assert (ROOT / "docs/pictures" / picture).stat().st_size > 1000
        assert f"pictures/{picture}" in page
