"""Golden cases of MiniCPM-Robot: inputs through the engine, every other tensor compared.

A case's kind is told by the tensors or keys inside; its name, sizes and seed mean nothing. Files
that start with ``track_`` are those of plugin ``minicpm_robot_track``.
"""

from __future__ import annotations

from pathlib import Path

from phyai.golden import GoldenRun


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case file; none of another plugin's.

    root: the folder of the set's config.json.
    Raises: CheckpointError when the file cannot be read or is of no known kind.
    """
    if path.name.startswith("track_"):
        return []
    from phyai.models.minicpm_robot.golden.cases import read_case, runs_of

    return runs_of(read_case(path, root))
