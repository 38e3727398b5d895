"""Reads the JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phyai.errors import CheckpointError, CheckpointNotFound


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises: CheckpointNotFound when there is no such file; CheckpointError when it is not a
    JSON object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointNotFound(
            f"{path.name} must exist in the checkpoint folder; {str(path.parent)!r} has none. "
            "Check the path."
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} must be a readable JSON file; got {error}. Download it again."
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object; got {type(data).__name__}. Download it again."
        )
    return data
