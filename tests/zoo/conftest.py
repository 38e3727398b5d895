"""The kit's own plugin, also where the environment was set up before it had an entry point."""

from __future__ import annotations

from phyai.testing.pytest_plugin import phyai_sandbox  # noqa: F401
