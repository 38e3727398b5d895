"""The local pool: processes that fail in every way take nothing with them but their requests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.adapter import AdapterArgs
from phyai.deployment import WorkerSupervisorConfig
from phyai.deployment.values import WorkerTraceback
from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phyai.errors import ConfigError, EngineUnavailableError, PluginError, RequestError
from phyai.types import Observation
from tests.core.pool_adapter import PLUGIN_ID, ask, installed, number

CPU = EngineConfig(
    device=DeviceConfig(target="cpu", params_dtype=torch.float32),
    runtime=RuntimeConfig(num_threads=1),
)


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("antics")) as cls:
        yield cls


def pool(
    args: Any, replicas: int = 2, *, retry: bool = False, start: bool = True, **patience: Any
) -> Engine:
    deployment = DeploymentConfig.local(
        devices=("cpu",) * replicas,
        replica_count=replicas,
        retry_on_worker_death=retry,
        auto_start=start,
        process_config=WorkerSupervisorConfig(**{"heartbeat_s": 0.2, **patience}),
    )
    return Engine(EngineArgs(PLUGIN_ID, args, CPU), deployment=deployment)


def until(reached: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait; the limit is that of a machine which does much else and starts processes."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def replicas(engine: Engine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.stats()["replicas"]
    return found


def states(engine: Engine) -> list[str]:
    return [replica["state"] for replica in replicas(engine)]


def all_ready(engine: Engine) -> None:
    until(lambda: set(states(engine)) == {"ready"})


def pids(engine: Engine) -> set[int]:
    """Return the process ids of loader and workers."""
    return {m.handle.pid for m in engine._back.members if m.handle}  # type: ignore[union-attr]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(found: set[int], seconds: float = 30.0) -> None:
    until(lambda: not any(alive(pid) for pid in found), seconds)


def died(future: Future[Any]) -> EngineUnavailableError:
    error = future.exception(timeout=60)
    assert isinstance(error, EngineUnavailableError), repr(error)
    assert error.reason == "worker_died"
    return error


def test_replicas_answer_fail_alone_and_leave_nothing(args: Any) -> None:
    """The only pool of the default tier."""
    with pool(args()) as engine:
        everybody = pids(engine)
        assert engine.mode == "local"
        assert engine.adapter is None
        assert engine.core is None
        homes = [number(engine.step(ask("pid"))) for _ in range(4)]
        assert homes[:2] == homes[2:]
        assert len({*homes, float(os.getpid())}) == 3
        assert len(everybody) == 3  # a loader and two workers
        result = engine.step(torch.tensor([[1.0], [2.0]]))
        with pytest.raises(ValueError, match="no such thing as 4") as caught:
            engine.step(ask("raise", 4.0))
        assert isinstance(caught.value.__cause__, WorkerTraceback)
        assert "in __call__" in str(caught.value.__cause__)
        future = engine.submit(ask("hard exit"))
        assert not future.cancel()
        assert "exited with code 5" in str(died(future))
        assert "last words" in str(died(future))
        assert number(engine.step(ask("sleep", 0.0))) == 0.0  # the other one goes on
    gone(everybody)
    assert result.flatten().tolist() == [1.0, 2.0]  # it does not end with the workers
    closed = engine.submit(ask("pid")).exception()
    assert isinstance(closed, EngineUnavailableError)
    assert closed.reason == "closed"


@pytest.mark.slow
def test_a_worker_killed_under_load_fails_its_own_requests_alone(args: Any) -> None:
    with pool(args()) as engine:
        first, second = (replica["pid"] for replica in replicas(engine))
        futures = [engine.submit(ask("sleep", 0.3)) for _ in range(10)]
        victim = [future for i, future in enumerate(futures) if i % 2 == 0]
        until(victim[0].done)
        waiting = [future for future in victim if not future.done()]
        os.kill(first, signal.SIGKILL)
        wait_for(futures, timeout=60)
        failed = [future for future in victim if future.exception()]
        assert failed
        assert set(failed) <= set(waiting)
        assert len(failed) >= len(waiting) - 1  # the one that ran may have answered just then
        for future in failed:
            assert f"(pid {first}) that was killed by SIGKILL" in str(died(future))
        assert not any(future.exception() for future in set(futures) - set(victim))
        all_ready(engine)
        again, same = (replica["pid"] for replica in replicas(engine))
        assert same == second
        assert again not in (first, second)
        assert replicas(engine)[0]["restarts"] == 1
        assert replicas(engine)[1]["restarts"] == 0
        assert {number(engine.step(ask("pid"))) for _ in range(2)} == {again, second}


@pytest.mark.slow
def test_every_way_for_a_step_to_go_wrong(args: Any) -> None:
    with pool(args(), max_restarts=10) as engine:
        before = {replica["pid"] for replica in replicas(engine)}
        with pytest.raises(MemoryError, match="out of it"):
            engine.step(ask("memory"))
        with pytest.raises(PluginError, match=r"must not end the process; it raised SystemExit\(3"):
            engine.step(ask("exit"))
        with pytest.raises(RequestError, match="at most 4 rows; got 5"):
            engine.step([ask("pid")] * 5)
        with pytest.raises(RequestError, match=r"request\.options\['noise'\]") as caught:
            engine.step(Observation(options={"noise": object()}))
        assert "object" in str(caught.value)
        assert {replica["pid"] for replica in replicas(engine)} == before  # none of it harms
        for do, words in (
            ("hard exit", "exited with code 5"),
            ("kill", "was killed by SIGKILL"),
            ("crash", "was killed by SIGSEGV"),
        ):
            error = died(engine.submit(ask(do)))
            assert words in str(error)
            all_ready(engine)
        assert "Fatal Python error: Segmentation fault" in str(error)
        assert sum(replica["restarts"] for replica in replicas(engine)) == 3
        assert sum(replica["failed"] for replica in replicas(engine)) == 7


@pytest.mark.slow
def test_restarts_run_out_one_by_one(args: Any) -> None:
    with pool(args(), max_restarts=1) as engine:
        for _ in range(4):
            died(engine.submit(ask("kill")))
            until(lambda: not {"starting", "restarting"} & set(states(engine)))
        assert states(engine) == ["dead", "dead"]
        refused = engine.submit(ask("pid"))
        assert refused.done()  # nothing is waited for
        error = died(refused)
        assert "none left after 1 restarts" in str(error)
        assert "SIGKILL" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("do", ["sleep", "hold"])
def test_a_stuck_worker_is_killed_and_a_slow_one_is_not(args: Any, do: str) -> None:
    with pool(args(), request_timeout_s=3.0) as engine:
        slow = [engine.submit(ask(do, 0.9)) for _ in range(8)]  # the fourth of a replica: 3.6 s
        assert [number(future.result(timeout=60)) for future in slow] == pytest.approx([0.9] * 8)
        assert [replica["restarts"] for replica in replicas(engine)] == [0, 0]
        stuck = engine.submit(ask(do, 600.0))
        behind = [engine.submit(ask("sleep", 1.0)) for _ in range(2)]
        error = died(stuck)
        assert "was stuck: no answer within request_timeout_s = 3 s" in str(error)
        answers = [future for future in behind if not future.exception(timeout=60)]
        assert len(answers) == 1  # the other waited behind it
        all_ready(engine)
        assert sorted(replica["restarts"] for replica in replicas(engine)) == [0, 1]
        assert number(engine.step(ask("sleep", 0.0))) == 0.0


@pytest.mark.slow
def test_a_request_may_run_again_elsewhere(args: Any, tmp_path: Path) -> None:
    with pool(args(), retry=True) as engine:
        waiting = [engine.submit(ask("sleep", 0.5)) for _ in range(2)]
        os.kill(replicas(engine)[0]["pid"], signal.SIGKILL)
        assert [number(future.result(timeout=60)) for future in waiting] == [0.5, 0.5]
        all_ready(engine)
        died(engine.submit(ask("kill")))  # once more only: it kills the other one, too
        all_ready(engine)


@pytest.mark.slow
def test_workers_outlive_their_loader(args: Any) -> None:
    with pool(args()) as engine:
        workers = {replica["pid"] for replica in replicas(engine)}
        (loader,) = pids(engine) - workers
        os.kill(loader, signal.SIGKILL)
        gone({loader})
        assert {number(engine.step(ask("pid"))) for _ in range(2)} == workers
        died(engine.submit(ask("kill")))
        all_ready(engine)
        assert pids(engine) - {replica["pid"] for replica in replicas(engine)} != {loader}
        assert len({number(engine.step(ask("pid"))) for _ in range(2)} & workers) == 1
        everybody = pids(engine)
    gone(everybody)


@pytest.mark.slow
def test_a_plugin_with_threads_gets_workers_of_its_own(
    args: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pool(args(thread=True)) as engine:
        assert "cannot share memory, so each loads its own copy" in caplog.text
        homes = {number(engine.step(ask("pid"))) for _ in range(4)}
        assert homes == {replica["pid"] for replica in replicas(engine)}
        assert len(homes) == 2
        assert pids(engine) == homes  # no loader is left
        died(engine.submit(ask("kill")))
        all_ready(engine)
        assert len({number(engine.step(ask("pid"))) for _ in range(2)}) == 2
    assert caplog.text.count("cannot share memory") == 1


@pytest.mark.slow
def test_replicas_differ_where_nobody_gave_a_seed(args: Any) -> None:
    with pool(args()) as engine:
        drawn = [number(engine.step(ask("random"))) for _ in range(4)]
        assert len(set(drawn)) == 4
        assert {number(engine.step(ask("threads"))) for _ in range(2)} == {1.0}


@pytest.mark.slow
def test_sleeping_steps_run_side_by_side(args: Any) -> None:
    with pool(args(), 2) as engine:
        engine.step(ask("sleep", 0.0))
        before = [one["done"] for one in engine.stats()["replicas"]]
        futures = [engine.submit(ask("sleep", 0.1)) for _ in range(20)]
        in_flight = [one["in_flight"] for one in engine.stats()["replicas"]]
        wait_for(futures)
        after = [one["done"] for one in engine.stats()["replicas"]]
    assert min(in_flight) > 0
    assert min(now - then for now, then in zip(after, before, strict=True)) >= 5


@pytest.mark.slow
def test_callbacks_close_and_threads(args: Any) -> None:
    engine = pool(args(), shutdown_timeout_s=2.0)
    errors: list[BaseException] = []

    def nested(_: Future[Any]) -> None:
        engine.reset_session("nobody")
        try:
            engine.step(ask("pid"))
        except EngineUnavailableError as error:
            errors.append(error)

    future = engine.submit(ask("pid"))
    future.add_done_callback(nested)
    future.result(timeout=60)
    until(lambda: errors)
    assert errors[0].reason == "wrong_mode"  # type: ignore[attr-defined]
    results: list[float] = []
    threads = [
        threading.Thread(target=lambda: results.append(number(engine.step(ask("sleep", 0.01)))))
        for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == pytest.approx([0.01] * 16)
    everybody = pids(engine)
    quick, slow = engine.submit(ask("sleep", 0.2)), engine.submit(ask("sleep", 30.0))
    engine.close()
    engine.close()
    gone(everybody)
    assert number(quick.result()) == pytest.approx(0.2)
    error = slow.exception()
    assert isinstance(error, EngineUnavailableError)
    assert error.reason == "closed"


@pytest.mark.slow
def test_large_values_and_many_at_once(args: Any) -> None:
    with pool(args()) as engine:
        image = np.random.default_rng(0).integers(0, 255, (480, 640, 3), dtype=np.uint8)
        rows = [
            Observation({"a": image, "b": image}, state=[float(n)], prompt="none")
            for n in range(40)
        ]
        futures = [engine.submit(row) for row in rows]
        assert [number(future.result(timeout=60)) for future in futures] == list(range(40))


@pytest.mark.slow
def test_a_pool_that_is_not_started_yet(args: Any) -> None:
    engine = pool(args(), 1, start=False)
    early = engine.submit(ask("pid")).exception()
    assert isinstance(early, EngineUnavailableError)
    assert early.reason == "starting"
    with engine:
        assert number(engine.step(ask("pid"))) == replicas(engine)[0]["pid"]
        assert engine.describe()["expects"] == {"state_dim": 1, "prompt": True}
        assert engine.describe()["max_rows"] == 4
        assert engine.describe()["manifest"].id == PLUGIN_ID


def test_what_cannot_run_in_workers_says_so(args: Any) -> None:
    with pytest.raises(TypeError, match="must be Args; got AdapterArgs"):
        Engine(
            EngineArgs(PLUGIN_ID, AdapterArgs(), CPU), deployment=DeploymentConfig.local(("cpu",))
        )
    with pytest.raises(ConfigError, match=r"target 'cpu'; got 'cuda:0'"):
        Engine(EngineArgs(PLUGIN_ID, args(), CPU), deployment=DeploymentConfig.local((0, "cpu"), 2))


@pytest.mark.slow
def test_arguments_that_cannot_travel(args: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be able to travel.*not lambdas"):
        pool(args(function=lambda key: key))
