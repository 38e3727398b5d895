"""MiniCPM-RobotManip requests that share a batch."""

from __future__ import annotations

import torch

from tests.cpu_engines import cpu_config
from tests.minicpm.minicpm_engines import engine_of, random_rows, request_of

ATOL = 2e-4
FOREVER_MS = 1e9  # only a full batch starts before that


def test_robots_share_a_batch_and_each_gets_its_own_actions() -> None:
    rows = random_rows([[(4, 4)]] * 4, [7, 9, 12, 8])
    requests = [request_of(rows[:1]), request_of(rows[1:3]), request_of(rows[3:])]
    with engine_of(cpu_config(batch_wait_ms=FOREVER_MS)) as engine:
        futures = [engine.submit(request) for request in requests]
        together = [future.result(60) for future in futures]
        assert engine.stats()["replicas"][0]["batches"]["rows"] == {4: 1}
        whole = engine.step(request_of(rows))
        assert torch.equal(torch.cat(together), whole)
    with engine_of() as engine:
        for request, ours in zip(requests, together, strict=True):
            torch.testing.assert_close(ours, engine.step(request), atol=ATOL, rtol=0)
