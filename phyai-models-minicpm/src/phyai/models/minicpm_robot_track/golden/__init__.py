"""Golden cases of MiniCPM-RobotTrack: official inputs, every other tensor compared.

A file's kind is told by its prefix ``track_case_`` and its tensors. The checkpoint is
``track_config.json`` and ``track_model.safetensors`` of the set. Files without the prefix are those
of plugin ``minicpm_robot``.
"""

from __future__ import annotations

from pathlib import Path

from phyai.errors import CheckpointError
from phyai.golden import GoldenRun

PREFIX = "track_case_"


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case file of a golden set; none of another plugin's.

    root: the set's folder.
    Raises: CheckpointError when the file cannot be read or is of no known kind.
    """
    if not path.name.startswith(PREFIX):
        return []
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"golden case {path.name} must be a safetensors file. Remove it from the set."
        )
    from phyai.models.minicpm_robot_track.golden.runs import case_runs

    return case_runs(path, root)
