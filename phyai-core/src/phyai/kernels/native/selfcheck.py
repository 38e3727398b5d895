"""Checks a freshly compiled library, alone in its process: ``python -m ...selfcheck PATH``."""

from __future__ import annotations

import sys
from pathlib import Path

from phyai.kernels.native.library import Library


def main() -> None:
    """Load the library and let it say what it was compiled for."""
    library = Library(Path(sys.argv[1]))
    assert library.isa, "the library must say what it was compiled for"


if __name__ == "__main__":
    main()
