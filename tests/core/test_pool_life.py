"""Beginning and end of a local pool: errors at start, Ctrl-C, a killed engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.deployment import WorkerSupervisorConfig
from phyai.errors import EngineUnavailableError, RequestError
from tests.core.pool_adapter import PLUGIN_ID, ask, installed, number
from tests.core.test_pool import CPU, all_ready, died, gone, pool, replicas, states, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time
from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.types import Observation

if __name__ == "__main__":
    import torch
    from antics_dist.model import Args
    config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))
    deployment = DeploymentConfig.local(devices=("cpu", "cpu"), replica_count=2)
    engine = Engine(
        EngineArgs("antics", Args(load_s=float(sys.argv[2])), config), deployment=deployment,
        progress=lambda *what: print("loading", flush=True) if what[0] > 0 else None,
    )
    do, value = sys.argv[1].split(":")
    for _ in range(3):
        future = engine.submit(Observation(state=[float(value)], prompt=do))
    print("running", flush=True)
    future.result()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("antics")
    (folder / "script.py").write_text(SCRIPT)
    with installed(folder) as cls:
        yield cls, folder


@pytest.fixture(scope="module")
def args(site: tuple[Any, Path]) -> Any:
    return site[0]


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def family(pid: int) -> set[int]:
    """Return the processes below a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for text in process.stdout:
        if text.strip() == line:
            return
    raise AssertionError(process.stderr.read() if process.stderr else "")


@pytest.mark.parametrize("do", ["sleep:600", "hold:600"])
def test_nothing_outlives_a_killed_engine(site: tuple[Any, Path], do: str) -> None:
    process = started(site[1], do, "0")
    wait_for_line(process, "running")
    time.sleep(0.3)
    children = family(process.pid)
    assert len(children) >= 3
    process.kill()
    gone(children)
    process.communicate()


def test_nothing_outlives_an_engine_that_is_killed_while_it_loads(site: tuple[Any, Path]) -> None:
    process = started(site[1], "pid:0", "600")
    until(lambda: any("phyai" in _command(pid) or "spawn" in _command(pid)
                      for pid in family(process.pid)))  # fmt: skip
    children = family(process.pid)
    process.kill()
    gone(children)
    process.communicate()


def test_ctrl_c_while_loading_leaves_nothing(site: tuple[Any, Path]) -> None:
    process = started(site[1], "pid:0", "20")
    wait_for_line(process, "loading")
    children = family(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert errors.count("Traceback") == 1  # the children say nothing
    gone(children)


def test_a_program_that_forgets_to_close_ends(site: tuple[Any, Path]) -> None:
    process = started(site[1], "sleep:0.1", "0")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == ""


@pytest.mark.parametrize("threads", [False, True])
def test_errors_of_a_start_keep_type_and_message(args: Any, threads: bool) -> None:
    before = family(os.getpid())
    with pytest.raises(RequestError, match=r"^loading went wrong$") as caught:
        pool(args(fail="raise", thread=threads))
    assert "in load" in str(caught.value.__cause__)
    with pytest.raises(EngineUnavailableError, match="exited with code 7") as ended:
        pool(args(fail="exit", thread=threads))
    assert ended.value.reason == "worker_died"
    with pytest.raises(EngineUnavailableError, match="was killed by SIGKILL"):
        pool(args(fail="kill", thread=threads))
    gone(family(os.getpid()) - before)


def test_a_load_that_takes_too_long_names_its_stage(args: Any) -> None:
    before = family(os.getpid())
    began = time.monotonic()
    pool(args(), 1).close()
    # Imports alone take long on a machine that is busy, and it may become so.
    limit = 5.0 + 3.0 * (time.monotonic() - began)
    with pytest.raises(EngineUnavailableError) as caught:
        pool(args(load_s=600.0), startup_timeout_s=limit)
    text = str(caught.value)
    assert f"was not ready within startup_timeout_s = {limit:g} s (stage: weights (" in text, text
    gone(family(os.getpid()) - before)


def test_a_long_load_is_not_hung(args: Any) -> None:
    told: list[tuple[int, int, str]] = []
    deployment = DeploymentConfig.local(
        devices=("cpu",),
        process_config=WorkerSupervisorConfig(heartbeat_s=0.1, request_timeout_s=2.0),
    )
    with Engine(
        EngineArgs(PLUGIN_ID, args(load_s=4.0), CPU),
        deployment=deployment,
        progress=lambda *what: told.append(what),
    ) as engine:
        assert [what[0] for what in told if what[2] == "weights"] == list(range(10))
        assert number(engine.step(ask("sleep", 0.1))) == pytest.approx(0.1)
        assert states(engine) == ["ready"]


def test_a_restart_that_fails_is_tried_again_until_there_are_none_left(
    args: Any, tmp_path: Path
) -> None:
    marker = tmp_path / "gone"
    with pool(args(marker=str(marker), thread=True), 1, max_restarts=2) as engine:
        marker.touch()
        died(engine.submit(ask("kill")))
        until(lambda: states(engine) == ["dead"], 120)
        assert replicas(engine)[0]["restarts"] == 2
        error = died(engine.submit(ask("pid")))
        assert "RuntimeError: the checkpoint is gone" in str(error)


def test_sigterm_of_the_group_is_for_the_engine_alone(args: Any) -> None:
    with pool(args(), 1) as engine:
        future = engine.submit(ask("sleep", 0.5))
        os.kill(replicas(engine)[0]["pid"], signal.SIGTERM)
        assert number(future.result(timeout=60)) == 0.5
        all_ready(engine)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
