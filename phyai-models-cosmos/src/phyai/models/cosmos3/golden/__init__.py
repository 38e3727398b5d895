"""Golden cases of Cosmos3: official inputs through the engine, every other tensor compared.

A case's kind is told by its tensors and metadata; its name, sizes and seeds mean nothing. Cases
with actions belong to plugin ``cosmos3_policy``, the others to ``cosmos3``.
"""

from __future__ import annotations

from pathlib import Path

from phyai.golden import GoldenRun


def generation_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case of plugin ``cosmos3``; none of the other plugin's.

    root: the folder of the set's checkpoint.
    Raises: CheckpointError when the file cannot be read or is of no known kind.
    """
    from phyai.models.cosmos3.golden.cases import read_case
    from phyai.models.cosmos3.golden.kinds import runs_of

    case = read_case(path, root)
    return [] if case.of_policy else runs_of(case)


def policy_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case of plugin ``cosmos3_policy``; see ``generation_runs``."""
    from phyai.models.cosmos3.golden.cases import read_case
    from phyai.models.cosmos3.golden.kinds import runs_of

    case = read_case(path, root)
    return runs_of(case) if case.of_policy else []
