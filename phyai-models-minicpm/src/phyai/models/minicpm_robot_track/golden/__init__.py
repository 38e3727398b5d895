"""Golden cases of MiniCPM-RobotTrack: official inputs, every other tensor compared.

A file's kind is told by its prefix ``track_case_`` and its tensors. The checkpoint is
``track_config.json`` and ``track_model.safetensors`` of the set.
"""

from __future__ import annotations

from pathlib import Path

from phyai.errors import CheckpointError
from phyai.golden import GoldenRun

PREFIX = "track_case_"


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case file of a golden set; ``root``: the set's folder.

    Raises: CheckpointError when the file cannot be read or is of no known kind.
    """
    if not path.name.startswith(PREFIX) or path.suffix != ".safetensors":
        raise CheckpointError(
            f"golden case {path.name} must be named {PREFIX}* and hold tensors. Choose the plugin "
            "it belongs to, or remove it from the set."
        )
    from phyai.models.minicpm_robot_track.golden.runs import case_runs

    return case_runs(path, root)
