"""Replicas of several ranks in a local pool: the end of a rank is that of its replica alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.deployment import WorkerSupervisorConfig
from phyai.deployment.members import Follower, Worker, how_ranks_ended
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.errors import (
    CommTimeoutError,
    ConfigError,
    EngineUnavailableError,
    RequestError,
    WeightUpdateError,
)
from tests.core.rank_adapter import PLUGIN_ID, ask, installed, number

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("ranked")) as cls:
        yield cls


def config(tp: int = 2, cfg: int = 1, timeout_s: float = 30.0) -> EngineConfig:
    return EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1),
        parallel=ParallelConfig(tp_size=tp, cfg_size=cfg, timeout_s=timeout_s),
    )


def pool(args: Any, setting: EngineConfig | None = None, **deployment: Any) -> Engine:
    patience = WorkerSupervisorConfig(heartbeat_s=0.2, max_restarts=10)
    return Engine(
        EngineArgs(PLUGIN_ID, args, setting or config()),
        deployment=DeploymentConfig.local(process_config=patience, **deployment),
    )


def until(reached: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait; the limit is that of a machine which does much else and starts processes."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def replica(engine: Engine, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = engine.stats()["replicas"][number]
    return found


def processes(engine: Engine) -> set[int]:
    return {m.handle.pid for m in engine._back.members if m.handle}  # type: ignore[union-attr]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(found: set[int], seconds: float = 30.0) -> None:
    until(lambda: not any(alive(pid) for pid in found), seconds)


def died(future: Future[Any], *texts: str) -> None:
    """Check the error of a request whose replica went, and that it names what it should."""
    error = future.exception(timeout=60)
    assert isinstance(error, EngineUnavailableError), repr(error)
    assert error.reason == "worker_died"
    for text in texts:
        assert text in str(error), str(error)


def ready_again(engine: Engine, before: set[int]) -> None:
    """Wait until the replica was restarted, with new processes for all its ranks."""
    gone(before)
    until(lambda: replica(engine)["state"] == "ready")
    assert not processes(engine) & before
    assert number(engine.step(ask("add", 2.0))) == 6.0


@slow
def test_two_ranks_answer_as_one_and_leave_nothing(args: Any) -> None:
    with pool(args(), devices=("cpu", "cpu"), output_rank=1) as engine:
        everybody = processes(engine)
        assert len(everybody) == 2
        assert replica(engine)["devices"] == ["cpu", "cpu"]
        assert set(replica(engine)["rank_pids"]) == everybody
        assert replica(engine)["pid"] == replica(engine)["rank_pids"][0]
        assert number(engine.step(ask("add", 2.0))) == 6.0
        assert number(engine.step(ask("rank"))) == 1.0  # the output rank's
        assert [number(r) for r in engine.step([ask("add", 1.0), ask("add", 5.0)])] == [3.0, 15.0]
        for request, kind in (
            (ask("bad"), RequestError),
            (ask("raise"), ValueError),
            (ask("no room"), MemoryError),
        ):
            with pytest.raises(kind):
                engine.step(request)
        assert engine.step(torch.tensor([[4.0]])).flatten().tolist() == [4.0]
        assert replica(engine)["restarts"] == 0
        assert replica(engine)["pid"] in everybody
    gone(everybody)


@slow
def test_a_rank_that_ends_in_a_request_fails_it_and_the_replica_comes_back(args: Any) -> None:
    with pool(args()) as engine:
        for do, rank, text in (
            ("kill", 1, "was killed by SIGKILL"),
            ("exit", 0, "exited with code 5.\nIts last words"),
        ):
            before = processes(engine)
            died(engine.submit(ask(do, rank)), f"rank {rank}, a worker (pid ", text)
            ready_again(engine, before)
        before = processes(engine)
        os.kill(replica(engine)["rank_pids"][1], signal.SIGKILL)  # in no request
        until(lambda: replica(engine)["state"] != "ready")
        assert "rank 1, a worker" in replica(engine)["last_error"]
        ready_again(engine, before)
    gone(before)


@slow
def test_a_rank_that_hangs_or_fails_alone_is_named(args: Any) -> None:
    with pool(args(), config(timeout_s=2.0)) as engine:
        before = processes(engine)
        died(engine.submit(ask("sleep on", 1.0)), "CommTimeoutError", "rank 1")
        ready_again(engine, before)
        before = processes(engine)
        died(engine.submit(ask("raise late on", 1.0)), "rank 1: ValueError: rank 1 cannot")
        ready_again(engine, before)
        before = processes(engine)
        died(engine.submit(ask("sleep on", 0.0)), "rank 0")
        ready_again(engine, before)


@slow
def test_other_replicas_go_on_and_weights_change_in_all_of_them(args: Any) -> None:
    with pool(args(), replica_count=2) as engine:
        assert len(processes(engine)) == 4
        assert engine.update_weights_all({"scale": torch.tensor([2.0])}) == 1
        assert [number(engine.step(ask("add", 1.0))) for _ in range(2)] == [6.0, 6.0]
        before = processes(engine)
        with pytest.raises(WeightUpdateError, match="unknown names"):
            engine.update_weights_all({"other": torch.zeros(1)})
        assert [number(engine.step(ask("add", 1.0))) for _ in range(2)] == [6.0, 6.0]
        assert processes(engine) == before
        # Rank 1 of both dies in the middle of this one, so all start again with what they had.
        with pytest.raises(WeightUpdateError, match="old ones stay in use"):
            engine.update_weights_all({"scale": torch.tensor([13.0])})
        gone(before)
        until(lambda: all(r["state"] == "ready" for r in engine.stats()["replicas"]))
        assert [number(engine.step(ask("add", 1.0))) for _ in range(2)] == [6.0, 6.0]
        assert engine.version == 1
        future = engine.submit(ask("kill", 1.0))
        assert number(engine.step(ask("add", 1.0))) == 6.0
        died(future, "rank 1")


@slow
def test_new_weights_reach_what_starts_and_are_taken_back_where_one_refuses(
    args: Any, tmp_path: Path
) -> None:
    marker = str(tmp_path / "refused")
    with pool(args(checkpoint_dir=marker), replica_count=2) as engine:
        os.kill(replica(engine, 1)["rank_pids"][1], signal.SIGKILL)
        until(lambda: replica(engine, 1)["state"] == "starting")
        assert engine.update_weights_all({"scale": torch.tensor([2.0])}) == 1
        until(lambda: replica(engine, 1)["state"] == "ready")
        assert [number(engine.step(ask("add", 1.0))) for _ in range(2)] == [6.0, 6.0]

        before = [set(replica(engine, n)["rank_pids"]) for n in range(2)]
        with pytest.raises(WeightUpdateError, match="this replica has no room"):
            engine.update_weights_all({"scale": torch.tensor([15.0])})
        # Who took them over starts again with what it had; who refused goes on.
        until(lambda: sum(replica(engine, n)["restarts"] for n in range(2)) == 2)
        until(lambda: all(r["state"] == "ready" for r in engine.stats()["replicas"]))
        after = [set(replica(engine, n)["rank_pids"]) for n in range(2)]
        assert sum(pids == old for pids, old in zip(after, before, strict=True)) == 1
        gone({pid for pids in before for pid in pids} - set.union(*after))
        assert [number(engine.step(ask("add", 1.0))) for _ in range(2)] == [6.0, 6.0]
        assert engine.version == 1


@slow
def test_a_rank_that_cannot_load_fails_the_start_with_its_error(args: Any) -> None:
    with pytest.raises(RequestError, match="loading went wrong on rank 1"):
        pool(args(fail_rank=1))


PROGRAM = """
import sys, time
sys.path[:0] = {path!r}
from tests.core.rank_adapter import PLUGIN_ID, ask
from tests.core.test_pool_ranks import config, pool, processes
from phyai.plugins import find

if __name__ == "__main__":
    engine = pool(find(PLUGIN_ID).load_args()())
    engine.submit(ask("sleep on", 1.0))
    time.sleep(0.5)
    print(*processes(engine), flush=True)
    time.sleep(1e6)
"""


@slow
def test_ranks_end_with_the_engines_process(args: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    site = str(Path(sys.modules[args.__module__].__file__ or "").parents[1])
    program.write_text(PROGRAM.format(path=[site, str(Path(__file__).parents[2])]))
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None
        found = {int(pid) for pid in it.stdout.readline().split()}
        assert len(found) == 2
        it.kill()
    gone(found)


@pytest.mark.parametrize(
    ("setting", "deployment", "text"),
    [
        (config(tp=2), {"devices": ("cpu",)}, r"1 \* 2 = 2 devices"),
        (config(tp=2), {"replica_count": 2, "devices": ("cpu",) * 2}, r"2 \* 2 = 4 devices"),
        (config(tp=2), {"output_rank": 2}, r"output_rank must be in \[0, 2\)"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_at_once(
    args: Any, setting: EngineConfig, deployment: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        pool(args(), setting, auto_start=False, **deployment)


# ---------------------------------------------------------------- whose fault it was


def made(**state: Any) -> tuple[Worker, Follower]:
    """Return rank 0 and rank 1 of a replica that is gone."""
    nothing: Any = None
    lead = Worker(nothing, nothing, replica=nothing)
    follower = Follower(nothing, nothing, lead=lead, rank=1)
    lead.followers.append(follower)
    lead.buried.append((1, "a worker that was killed by SIGKILL.", follower))
    for name, value in state.items():
        member, _, attribute = name.partition("_")
        setattr({"lead": lead, "follower": follower}[member], attribute, value)
    return lead, follower


LATE = CommTimeoutError("every rank must arrive", ranks=(1,))


@pytest.mark.parametrize(
    ("state", "text", "error"),
    [
        ({"lead_error": LATE}, "rank 1, a worker that was killed by SIGKILL.", None),
        ({"lead_swept": True}, "rank 1, a worker that was killed by SIGKILL.", None),
        (
            {"lead_error": LATE, "follower_swept": True},
            "ranks that cannot go on together. rank 0: CommTimeoutError: every rank must arrive",
            CommTimeoutError,
        ),
        (
            {"lead_error": LATE, "follower_error": RequestError("bad file")},
            "every rank must arrive; rank 1: RequestError: bad file",
            RequestError,
        ),
        ({"lead_swept": True, "follower_swept": True}, "rank 0, a worker that exited.", None),
    ],
    ids=["it died", "it died first", "it was late", "it told why", "all at once"],
)
def test_the_rank_whose_fault_it_was_is_named(
    state: dict[str, Any], text: str, error: type[Exception] | None
) -> None:
    lead, _ = made(**state)
    why, found = how_ranks_ended(lead, "a worker that exited.")
    assert why.endswith(text)
    assert type(found) is (error or type(None))
    lead.ready = True  # its requests fail with the text, not with what a start would raise
    assert how_ranks_ended(lead, "a worker that exited.") == (why, None)
