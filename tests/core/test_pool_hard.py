"""What programs and systems do to a pool: callbacks that end or block, forks, stopped processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai.deployment import processes
from phyai.deployment.weight_switch import WeightSwitch
from phyai.errors import EngineUnavailableError, WeightUpdateError
from phyai.types import Observation
from tests.core.pool_adapter import ask, installed, number
from tests.core.test_pool import all_ready, gone, pids, pool, replicas, states, until

SCRIPT = """
import os, sys, time
from dataclasses import dataclass
from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.types import Observation

@dataclass(frozen=True)
class Mine(Observation):
    pass

def engine():
    from antics_dist.model import Args
    config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="float32"))
    deployment = DeploymentConfig.local(devices=("cpu", "cpu"), replica_count=2)
    return Engine(EngineArgs("antics", Args(), config), deployment=deployment)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    folder = tmp_path_factory.mktemp("antics")
    with installed(folder) as cls:
        yield cls, folder


@pytest.fixture(scope="module")
def args(site: tuple[Any, Path]) -> Any:
    return site[0]


def run(site: tuple[Any, Path], text: str) -> subprocess.CompletedProcess[str]:
    """Run a program that is read from stdin."""
    return subprocess.run(
        [sys.executable, "-"],
        input=SCRIPT + text,
        env={**os.environ, "PYTHONPATH": str(site[1] / "site")},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_a_worker_that_never_stops_talking_gets_its_turn_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tail, reads = processes.StderrTail(), []

    def read(fd: int, size: int) -> bytes:
        reads.append(fd)
        return b"x" * size

    monkeypatch.setattr(os, "read", read)
    monkeypatch.setattr(sys, "stderr", None)
    assert tail.feed()
    assert 1 <= len(reads) < 20
    assert len(tail.text()) < 2 * processes.TAIL_BYTES
    tail.close()


@pytest.mark.slow
def test_a_callback_that_ends_its_thread_does_not_end_the_pool(args: Any) -> None:
    def leave(error: type[BaseException]) -> Any:
        def act(future: Any) -> None:
            raise error

        return act

    with pool(args()) as engine:
        for error in (SystemExit, KeyboardInterrupt, asyncio.CancelledError, ValueError):
            future = engine.submit(ask("sleep", 0.1))
            future.add_done_callback(leave(error))
            future.result(timeout=30)
            for value in (1.0, 2.0, 3.0):
                assert number(engine.submit(ask("", value)).result(timeout=30)) == value


@pytest.mark.slow
def test_a_callback_that_blocks_costs_time_and_nothing_else(args: Any) -> None:
    """Answers that wait for it are there: their workers are not stuck. And close() ends."""
    free = threading.Event()
    engine = pool(args(), request_timeout_s=2.0, shutdown_timeout_s=1.0)
    everybody = pids(engine)
    slow = engine.submit(ask("sleep", 0.1))
    slow.add_done_callback(lambda future: time.sleep(4.0))
    other = engine.submit(ask("sleep", 0.5))
    assert number(other.result(timeout=30)) == 0.5
    time.sleep(0.5)
    assert pids(engine) == everybody
    slow = engine.submit(ask("sleep", 0.1))
    slow.add_done_callback(lambda future: free.wait(60.0))
    slow.result(timeout=30)
    engine.close()
    gone(everybody)
    assert not free.is_set()
    free.set()


@pytest.mark.slow
def test_a_fork_of_the_program_has_no_part_in_the_pool(args: Any) -> None:
    with pool(args()) as engine:
        everybody = pids(engine)
        pid = os.fork()
        if pid == 0:  # what a process of multiprocessing does by accident, at its end
            code = 3
            try:
                error = engine.submit(ask("pid")).exception(timeout=10)
                engine.stats()
                engine.close()
                engine._back._end()  # type: ignore[union-attr]
                if isinstance(error, EngineUnavailableError) and "a fork" in str(error):
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        time.sleep(0.3)
        assert pids(engine) == everybody
        assert len({number(engine.step(ask("pid"))) for _ in range(4)}) == 2
    gone(everybody)


@pytest.mark.slow
def test_a_fork_of_a_killed_program_keeps_no_worker_alive(site: tuple[Any, Path]) -> None:
    text = """
found = engine()
if (pid := os.fork()) == 0:
    os.close(1); os.close(2)
    time.sleep(60)
    os._exit(0)
print(pid, *(m.handle.pid for m in found._back.members), flush=True)
found.submit(Observation(state=[60.0], prompt="hold"))
time.sleep(0.3)
os.kill(os.getpid(), 9)
"""
    done = run(site, text)
    assert done.returncode == -signal.SIGKILL, done.stderr
    fork, *workers = map(int, done.stdout.split())
    try:
        assert len(workers) == 3
        gone(set(workers))
    finally:
        os.kill(fork, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_of_an_update_that_dies_amid_sessions_ends_the_update(
    args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = WeightSwitch._ask

    def deadly(self: WeightSwitch, worker: Any, kind: str, value: Any) -> Any:
        if kind == "import_sessions":
            os.kill(worker.handle.pid, signal.SIGSTOP)
            threading.Timer(0.3, worker.handle.kill).start()
        return plain(self, worker, kind, value)

    with pool(args(kept=True)) as engine:
        engine.step(ask("sum", 1.0, session_id="arm", seq=0))
        with monkeypatch.context() as patch:
            patch.setattr(WeightSwitch, "_ask", deadly)
            with pytest.raises(WeightUpdateError, match="SIGKILL"):
                engine.update_weights_all({"scale": torch.tensor([2.0])})
        assert engine.version == 0
        assert number(engine.step(ask("sum", 1.0, session_id="arm", seq=1))) == 2.0
        assert engine.update_weights_all({"scale": torch.tensor([2.0])}) == 1
        assert number(engine.step(ask("sum", 1.0, session_id="arm", seq=2))) == 3.0


@pytest.mark.slow
def test_updates_that_make_no_sense_and_updates_of_a_pool_that_closes(args: Any) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        raise OSError("disk")
        yield

    engine = pool(args())
    everybody = pids(engine)
    for items in (5, [("scale",)], broken(), {"scale": object()}, {3: torch.ones(1)}):
        with pytest.raises(WeightUpdateError):
            engine.update_weights_all(items)  # type: ignore[arg-type]
    for version in (-1, "two", 1.5, True):
        with pytest.raises(WeightUpdateError, match="version must be"):
            engine.update_weights_all({"scale": torch.ones(1)}, version=version)  # type: ignore[arg-type]
    assert engine.version == 0
    assert pids(engine) >= everybody
    ended: list[BaseException] = []

    def update() -> None:
        try:
            while True:
                engine.update_weights_all({"scale": torch.tensor([2.0])})
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=update)
    thread.start()
    until(lambda: engine.version >= 1)
    engine.close()
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert isinstance(ended[0], (WeightUpdateError, EngineUnavailableError))
    gone(everybody)


@pytest.mark.slow
def test_a_loader_that_hangs_is_given_up_after_the_startup_timeout(args: Any) -> None:
    with pool(args()) as engine:
        back: Any = engine._back
        back.limits = dataclasses.replace(back.limits, startup_timeout_s=2.0)
        loader = back.loader.handle.pid
        os.kill(loader, signal.SIGSTOP)
        os.kill(int(number(engine.step(ask("pid")))), signal.SIGKILL)
        until(lambda: "starting" in states(engine))
        assert number(engine.step(ask("", 1.0))) == 1.0
        gone({loader})
        back.limits = dataclasses.replace(back.limits, startup_timeout_s=200.0)
        all_ready(engine)  # of a new loader


@pytest.mark.slow
def test_what_runs_again_elsewhere_is_what_was_sent(args: Any) -> None:
    with pool(args(), retry=True) as engine:
        state = np.array([5.0])
        first, second = sorted({int(number(engine.step(ask("pid")))) for _ in range(2)})
        for pid in (first, second):
            os.kill(pid, signal.SIGSTOP)
        futures = [engine.submit(Observation(state=state, prompt="")) for _ in range(2)]
        state[0] = 7.0  # the program's own array, which it uses again
        os.kill(first, signal.SIGKILL)
        os.kill(second, signal.SIGCONT)
        assert [number(future.result(timeout=30)) for future in futures] == [5.0, 5.0]
        assert sum(replica["failed"] for replica in replicas(engine)) <= 1


@pytest.mark.slow
def test_programs_from_stdin_and_lost_folders(site: tuple[Any, Path]) -> None:
    text = """
with engine() as found:
    print(found.step(Observation(state=[4.0], prompt="")).actions.ravel())
    print(found.submit(Mine(state=[4.0], prompt="")).exception())
import tempfile
folder = tempfile.mkdtemp(); os.chdir(folder); os.rmdir(folder)
engine()
"""
    done = run(site, text)
    assert "[4.]" in done.stdout
    assert "a main module that is no file" in done.stdout
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("phyai.errors.ConfigError: working directory must exist")
    )
