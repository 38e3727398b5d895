"""Golden cases of GR00T N1.7: official inputs through the engine, every other tensor compared."""

from __future__ import annotations

from pathlib import Path

from phyai.errors import CheckpointError
from phyai.golden import GoldenRun


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case file of a golden set; ``root``: the folder of its config.json.

    Raises: CheckpointError when the file cannot be read or is of no known kind.
    """
    if path.name.startswith("preprocess_"):
        from phyai.models.gr00t.golden.preprocess import preprocess_runs

        return list(preprocess_runs(path, root))
    if not path.name.startswith("case_") or path.suffix != ".safetensors":
        raise CheckpointError(
            f"golden case {path.name} must be named case_* or preprocess_* and hold tensors; got "
            f"{path.suffix!r}. Remove it from the set."
        )
    from phyai.models.gr00t.golden.runs import case_runs, read_case

    return case_runs(read_case(path, root))
