"""A long stream: memory and work per frame stay what they were, and so do the results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from phyai import Engine
from tests.minicpm.track_engines import Stream, engine_of, write_tiny

FRAMES = 500
ATOL = 1e-5
ROWS = 8
"""Windows that are computed from scratch at once."""


def _bytes(engine: Engine) -> tuple[int, int]:
    return engine.core.services.memory.nbytes, engine.core.sessions.stats()["bytes"]


@pytest.mark.slow
def test_500_frames_cost_the_same_and_equal_their_windows(tmp_path: Path) -> None:
    stream = Stream(FRAMES)
    with engine_of(write_tiny(tmp_path), max_batch_size=ROWS) as engine:
        counters = engine.core.services.profile.counters
        got, work, memory = [], Counter[tuple[tuple[str, int], ...]](), set()
        for t in range(FRAMES):
            before = dict(counters)
            got.append(engine.step(stream.step(t)).actions)
            if t:
                done = {name: n - before.get(name, 0) for name, n in counters.items()}
                work[tuple(sorted((n, v) for n, v in done.items() if v))] += 1
                memory.add(_bytes(engine))
        assert len(work) == 1, work
        assert len(memory) == 1, memory
        assert engine.core.sessions.stats()["live"] == 1
        want = []
        for start in range(0, FRAMES, ROWS):
            rows = [stream.window(t) for t in range(start, min(start + ROWS, FRAMES))]
            want += [chunk.actions for chunk in engine.step(rows)]
    np.testing.assert_allclose(np.stack(got), np.stack(want), atol=ATOL, rtol=0)
    assert np.stack(got).std() > 0.05
