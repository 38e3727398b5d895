"""Fixtures for plugin authors, in pytest's entry-point group; imports no torch.

pytest loads this in every project that has phyai-core installed, so it must cost nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from phyai.testing.sandbox import Sandbox


@pytest.fixture
def phyai_sandbox(tmp_path: Path) -> Sandbox:
    """Return an empty sandbox for throw-away distributions; see ``phyai.testing.sandbox``."""
    from phyai.testing.sandbox import Sandbox

    return Sandbox(tmp_path / "site")
