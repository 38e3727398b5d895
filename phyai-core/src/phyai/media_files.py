"""What a plugin offers to put its results into files, and to read videos from them.

Layer 1, torch-free. A plugin's manifest may name a function that returns one; the command line
asks it before anything is loaded or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class MediaFiles(Protocol):
    """Files of one plugin's media.

    suffixes: of video files it reads, such as ``(".mp4",)``.
    """

    suffixes: Sequence[str]

    def check(self, path: Path, request: Any, args: Any) -> None:
        """Raise unless the result of ``request`` can be written to ``path``.

        args: the adapter's arguments.
        Raises: ConfigError for the place and its ending; MissingDependency for what must be
            installed.
        """
        ...

    def write(self, path: Path, result: Any) -> None:
        """Write the result of one row, whole or not at all; replaces an older file."""
        ...

    def read(self, path: Path) -> Any:
        """Return the frames of a video file, uint8 [T, height, width, 3]."""
        ...
