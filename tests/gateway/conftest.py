"""Fixtures of the gateway's tests."""

from __future__ import annotations

import pytest

from tests.gateway.stub_world import Clock


@pytest.fixture
def clock() -> Clock:
    """Return a clock that only the test moves."""
    return Clock()
