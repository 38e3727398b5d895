"""Requests that share a batch in the workers of a local pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.deployment import WorkerSupervisorConfig
from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from tests.core.pool_adapter import PLUGIN_ID, ask, installed, number
from tests.core.test_pool import all_ready, died, replicas, until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One worker that only runs full batches of four rows, or when the next cannot join."""
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1, batch_wait_ms=1e9),
    )
    deployment = DeploymentConfig.local(
        devices=("cpu",),
        replica_count=1,
        process_config=WorkerSupervisorConfig(heartbeat_s=0.1, max_restarts=9),
    )
    with installed(tmp_path_factory.mktemp("antics")) as args:
        made = EngineArgs(PLUGIN_ID, args(kept=True), config)
        with Engine(made, deployment=deployment) as opened:
            yield opened


def ran(engine: Engine) -> dict[int, int]:
    (replica,) = replicas(engine)
    rows: dict[int, int] = replica["batches"]["rows"]
    return rows


def share(engine: Engine, *requests: Any) -> list[Any]:
    return [future.result(60) for future in [engine.submit(request) for request in requests]]


def test_those_that_wait_share_a_batch_and_its_time_counts_once(engine: Engine) -> None:
    before = ran(engine).get(4, 0)
    answers = share(engine, *[ask("sleep", 1.0)] * 4)
    assert [answer.info["batch_rows"] for answer in answers] == [4] * 4
    until(lambda: replicas(engine)[0]["busy_s"] >= 1.0)
    assert replicas(engine)[0]["busy_s"] < 4.0  # what four waited
    assert ran(engine)[4] == before + 1


def test_the_sessions_of_a_batch_go_on(engine: Engine) -> None:
    for seq in range(3):
        rows = [ask("sum", float(n), session_id=str(n), seq=seq) for n in range(4)]
        assert [number(answer) for answer in share(engine, *rows)] == [
            n * (seq + 1.0) for n in range(4)
        ]


def test_a_batch_that_fails_fails_whole_and_the_next_one_works(engine: Engine) -> None:
    futures = [engine.submit(ask("raise", float(n))) for n in range(4)]
    errors = [str(future.exception(60)) for future in futures]
    assert errors == ["no such thing as 0.0"] * 4  # of its first row


def test_a_worker_that_dies_takes_those_that_wait_in_it(engine: Engine) -> None:
    futures = [engine.submit(ask("pid")) for _ in range(3)]
    os.kill(replicas(engine)[0]["pid"], signal.SIGKILL)
    assert all("killed by SIGKILL" in str(died(future)) for future in futures)
    all_ready(engine)
    (pid,) = {number(answer) for answer in share(engine, *[ask("pid")] * 4)}
    assert pid == replicas(engine)[0]["pid"]
