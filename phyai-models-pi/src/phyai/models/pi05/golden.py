"""Golden cases of pi0.5."""

from __future__ import annotations

from pathlib import Path

from phyai.golden import GoldenRun
from phyai.models.pi.golden.runs import runs_of
from phyai.models.pi05.main_pi05 import PI05Adapter


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case file of a golden set; see ``runs_of``."""
    return runs_of(path, root, PI05Adapter)
