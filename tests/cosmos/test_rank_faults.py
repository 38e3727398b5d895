"""Cosmos3 on several ranks: a rank that dies, layouts that cannot be, what the CLI tells."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from phyai import DeploymentConfig
from phyai.cli.app import main
from phyai.deployment import WorkerSupervisorConfig
from phyai.errors import ConfigError, EngineUnavailableError
from tests.core.test_pool import gone, until
from tests.cosmos.cosmos_engines import GENERATION, POLICY, ROOT, prompt
from tests.cosmos.rank_cases import opened
from tests.native_cache import share_native
from tests.rank_runs import Mesh

pytestmark = pytest.mark.slow


def test_a_rank_killed_in_a_request_fails_it_and_the_replica_comes_back() -> None:
    patience = WorkerSupervisorConfig(heartbeat_s=0.2, max_restarts=3)
    deployment = DeploymentConfig.local(process_config=patience)
    with opened(GENERATION, Mesh(tp=2), deployment=deployment) as engine:
        first = engine.step(prompt()).data
        before = set(engine.stats()["replicas"][0]["rank_pids"])
        victim = engine.stats()["replicas"][0]["rank_pids"][1]

        def kill(done: int, total: int) -> None:
            if done == 2:
                os.kill(victim, signal.SIGKILL)

        error = engine.submit(prompt(num_steps=500), kill).exception(timeout=120)
        assert isinstance(error, EngineUnavailableError), repr(error)
        assert error.reason == "worker_died"
        assert f"rank 1, a worker (pid {victim}) that was killed by SIGKILL" in str(error)
        until(lambda: engine.stats()["replicas"][0]["state"] == "ready", 120)
        after = set(engine.stats()["replicas"][0]["rank_pids"])
        assert not after & before
        assert np.array_equal(engine.step(prompt()).data, first)
    gone(before | after, 5)


def test_ranks_that_cannot_share_the_heads_are_told_which_sizes_work() -> None:
    with (
        pytest.raises(ConfigError, match=r"8 query heads.*got 3\. Sizes that work: 1, 2, 4, 8\."),
        opened(POLICY, Mesh(tp=3)),
    ):
        pass


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (("--set", "parallel.cfg_size=3"), ("cfg_size must be 1 or 2", "got 3")),
        (("--arg", "resolution=999"), ("resolution must be one of 256, 480", "got '999'")),
        (("--checkpoint", "no_vae"), ("folder 'vae' with the video autoencoder",)),
    ],
    ids=["guidance ranks", "canvas", "no autoencoder"],
)
def test_the_command_line_tells_what_cannot_be(
    arguments: tuple[str, ...],
    texts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    share_native(tmp_path / "cache")
    monkeypatch.setenv("PHYAI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT, "no_vae", ignore=shutil.ignore_patterns("vae", "case_*"))
    assert main(["run", "--plugin", POLICY, *arguments]) == 2
    out, err = capsys.readouterr()
    assert "ms" not in out
    assert "Traceback" not in err
    for text in texts:
        assert text in err
