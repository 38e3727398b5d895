"""Engines over the golden checkpoints whose graphs are recorded and replayed on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phyai import Engine
from tests.cpu_engines import recording_engine, reference_config
from tests.pi.tiny_requests import pi_args


@contextmanager
def recorded_engine(
    model: str, *, limit: int = 64, runtime: Any = None, **changes: Any
) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint of ``model`` that replays recorded graphs."""
    config = reference_config(**(runtime or {}))
    with recording_engine(model, pi_args(model, **changes), config, limit=limit) as engine:
        yield engine
