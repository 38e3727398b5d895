"""Ranks that torchrun starts: each process makes the same calls, rank 0's requests count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from phyai.testing.sandbox import Sandbox
from tests.core.rank_adapter import MANIFEST, MODEL, PLUGIN_ID

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sandbox = Sandbox(tmp_path_factory.mktemp("launched") / "site")
    sandbox.adapter(PLUGIN_ID, model=MODEL, more=MANIFEST)
    return sandbox.folder


def launch(
    site: Path, folder: Path, scenario: str, *, ranks: int = 2
) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PHYAI_")}
    path = [str(site), str(ROOT), *filter(None, [inherited.pop("PYTHONPATH", "")])]
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            "--local-addr",
            "localhost",
            "-m",
            "tests.core.launched_program",
            str(folder),
            scenario,
        ],
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def told(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{rank}.json").read_text())
    return found


def test_torchrun_runs_one_replica(site: Path, tmp_path: Path) -> None:
    done = launch(site, tmp_path, "")
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = told(tmp_path, rank)
        assert found["mode"] == "external"
        assert found["steps"] == found["futures"] == [6.0, 15.0]  # (1 + 2) * rank 0's value
        assert found["bad"].startswith("RequestError: prompt must be good")
        assert found["version"] == 1
        assert found["updated"] == 60.0


def test_engines_of_one_program_come_one_after_the_other_or_two_at_once(
    site: Path, tmp_path: Path
) -> None:
    done = launch(site, tmp_path, "several")
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        found = told(tmp_path, rank)
        assert found["one by one"] == [6.0] * 5
        assert found["both"] == [3.0, 3.0]
        assert found["second alone"] == 9.0
        opened = found["open files"]  # the first engine opens some for good
        assert opened[1:] == [opened[1]] * 4


def test_a_rank_that_dies_is_an_error_of_the_others(site: Path, tmp_path: Path) -> None:
    done = launch(site, tmp_path, "kill")
    assert "SIGKILL" in done.stderr, done.stderr[-4000:]
    found = told(tmp_path, 0)
    assert "1" in found["killed"]
    assert found["after"].startswith("EngineUnavailableError")


def test_more_processes_than_ranks_are_refused(site: Path, tmp_path: Path) -> None:
    done = launch(site, tmp_path, "", ranks=3)
    assert done.returncode != 0
    assert "WORLD_SIZE must be the ranks of one replica" in done.stderr
