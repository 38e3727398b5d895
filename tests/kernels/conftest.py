"""Fixtures of the kernel tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a machine without a C++ compiler: the rows built on torch decide."""
    monkeypatch.setattr("phyai.kernels.native.available", lambda: "no C++ compiler here")
