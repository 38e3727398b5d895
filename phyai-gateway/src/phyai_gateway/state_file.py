"""Registrations that survive a restart: one JSON file, replaced whole."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
VERSION = 1
MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Registration:
    """A backend as it was registered; ``draining`` as an operator set it."""

    model: str
    endpoint: str
    weight: float = 1.0
    draining: bool = False


class StateFile:
    """The file of ``--state``. Nothing here raises: a full disk must not stop robots."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: str | None = None

    def read(self) -> list[Registration]:
        """Return what was saved; a damaged file is set aside with a warning, and nothing lost."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._set_aside(f"cannot be read: {error.strerror}")  # or the next write replaces it
            return []
        try:
            return _parse(data)
        except (ValueError, OverflowError, RecursionError) as error:
            self._set_aside(str(error))
            return []

    def _set_aside(self, reason: str) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        try:
            os.replace(self.path, aside)
            log.warning("state file is damaged (%s): kept as %s", reason, aside.name)
        except OSError as error:
            log.warning("state file is damaged (%s) and stays: %s", reason, error.strerror)

    def write(self, registrations: Sequence[Registration]) -> bool:
        """Replace the file; returns False, with ``error`` set, when the disk refuses."""
        rows = [
            {
                "model_name": r.model,
                "endpoint": r.endpoint,
                "weight": r.weight,
                "draining": r.draining,
            }
            for r in registrations
        ]
        text = json.dumps({"version": VERSION, "backends": rows}, indent=1)
        temporary: str | None = None
        try:
            handle, temporary = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            _sync_folder(self.path.parent)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            if reason != self.error:  # tried again each second: one line is enough
                log.error("state file was not written (%s): the old one is kept", reason)
            self.error = reason
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return False
        self.error = None
        return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parse(data: bytes) -> list[Registration]:
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    found: Any = json.loads(data)
    if not isinstance(found, dict) or found.get("version") != VERSION:
        raise ValueError(f"not version {VERSION}")
    rows = found.get("backends")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("no list of backends")
    return [_registration(row) for row in rows]


def _registration(row: dict[str, Any]) -> Registration:
    model, endpoint = row.get("model_name"), row.get("endpoint")
    weight, draining = row.get("weight", 1.0), row.get("draining", False)
    texts = isinstance(model, str) and isinstance(endpoint, str)
    if not texts or not isinstance(weight, int | float) or not isinstance(draining, bool):
        raise ValueError("a backend with wrong values")
    return Registration(str(model), str(endpoint), float(weight), draining)
