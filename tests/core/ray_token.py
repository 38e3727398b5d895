"""What protects the Ray clusters of a test process: Ray reads it once, so all of them share it."""

from __future__ import annotations

import secrets

TOKEN = secrets.token_hex(32)
"""For RAY_AUTH_TOKEN; without it Ray makes one in the home folder."""
