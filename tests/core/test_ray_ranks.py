"""Replicas of several ranks on Ray: they live and end together; progress and stops of requests."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.deployment import RayConfig, WorkerSupervisorConfig
from phyai.deployment.ray_cluster import Connection, Resources
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig, RuntimeConfig
from phyai.errors import EngineUnavailableError, RequestError, WeightUpdateError
from phyai.testing.sandbox import Sandbox
from tests.core.rank_adapter import MANIFEST, MODEL, PLUGIN_ID, ask, number
from tests.core.ray_token import TOKEN

pytestmark = pytest.mark.slow

SOON_S = 120.0  # these machines are busy: nothing here is about speed
CPUS = 3
STEPS = 5

HELD_STEPS = """
import os, time
from dataclasses import dataclass

import torch

from phyai.adapter import Adapter, AdapterArgs
from phyai.types import Key, Prepared


@dataclass
class Args(AdapterArgs):
    max_batch_size: int = 4
    unit: str = "step"
    hold: str = ""               # a file; while it is there, no request goes beyond its first step


class Model(Adapter):
    name = "steps"
    args_cls = Args
    parallel = frozenset({"tp"})

    def __init__(self, args, config, services):
        super().__init__(args, config, services)
        self.graph_unit = args.unit

    def prepare(self, request):
        return Prepared({"noise.action": request}, len(request), Key(num_steps=5))

    def denoiser(self):
        return Falling(self)

    def output(self):
        return Out(self)


class Falling:
    prediction = "velocity"

    def __init__(self, model):
        self.model, model.evaluations = model, 0

    def __call__(self, x, step, cache):
        self.model.evaluations += 1
        while float(x["action"].max()) < 0 and os.path.exists(self.model.args.hold):
            time.sleep(0.01)
        tp = self.model.services.parallel.tp
        return {"action": tp.all_reduce(x["action"] * 0 + 1) / tp.size}


class Out:
    def __init__(self, model):
        self.model = model

    def tensors(self, x, cache, prepared):
        count = torch.tensor([float(self.model.evaluations)])
        return {"action": x["action"], "evaluations": count.expand(len(x["action"])).clone()}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes on this machine; this process stays connected to them."""
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray") / "site"
    sandbox = Sandbox(folder)
    sandbox.adapter(PLUGIN_ID, model=MODEL, more=MANIFEST)
    sandbox.adapter("steps", model=HELD_STEPS, more=", capabilities={'parallel': ['tp']}")
    node = {"num_cpus": CPUS, "object_store_memory": 200 * 2**20, "include_dashboard": False}
    with pytest.MonkeyPatch.context() as patch, sandbox.visible():
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        made = Cluster(initialize_head=True, head_node_args=node)
        try:
            made.add_node(**node)
            connection = Connection(RayConfig(address=made.address), Resources(1.0, 0.0))
            try:
                yield made
            finally:
                connection.release()
        finally:
            made.shutdown()


def engine(
    cluster: Any, plugin: str = PLUGIN_ID, tp: int = 2, timeout_s: float = 30.0, **more: Any
) -> Engine:
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(num_threads=1),
        parallel=ParallelConfig(tp_size=tp, timeout_s=timeout_s),
    )
    limits = {"heartbeat_s": 0.3, "max_restarts": 10} | more.pop("limits", {})
    deployment = {"output_rank": more.pop("output_rank", 0)}
    args = importlib.import_module(f"{plugin}_dist.model").Args(**more)
    return Engine(
        EngineArgs(plugin, args, config),
        deployment=DeploymentConfig.ray(
            address=cluster.address, process_config=WorkerSupervisorConfig(**limits), **deployment
        ),
    )


def replica(of: Engine) -> dict[str, Any]:
    found: dict[str, Any] = of.stats()["replicas"][0]
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def actors() -> int:
    from ray._private import state

    return sum(actor["State"] not in ("DEAD",) for actor in state.actors().values())


def groups() -> list[str]:
    """Return the strategies of the placement groups that are there."""
    from ray.util import placement_group_table

    found = placement_group_table().values()
    return [group["strategy"] for group in found if group["state"] != "REMOVED"]


def nothing_left(pids: list[int]) -> None:
    until(lambda: not any(alive(pid) for pid in pids))
    until(lambda: actors() == 0 and groups() == [])


def died(future: Future[Any], *texts: str) -> None:
    """Check the error of a request whose replica went, and that it names what it should."""
    error = future.exception(timeout=SOON_S)
    assert isinstance(error, EngineUnavailableError), repr(error)
    assert error.reason == "worker_died"
    for text in texts:
        assert text in str(error), str(error)


def outcome(future: Future[Any]) -> Any:
    """Return the result, or the error."""
    try:
        return future.result(SOON_S)
    except (CancelledError, Exception) as error:
        return error


def ready_again(of: Engine, before: list[int]) -> list[int]:
    """Wait until the replica was restarted, in new processes for all its ranks; return those."""
    until(lambda: replica(of)["state"] == "ready")
    until(lambda: not any(alive(pid) for pid in before))
    now: list[int] = replica(of)["rank_pids"]
    assert not set(now) & set(before)
    assert number(of.step(ask("add", 2.0))) == 6.0
    until(lambda: actors() == len(now) and groups() == ["STRICT_PACK"])
    return now


def test_two_ranks_answer_as_one_and_end_as_one(cluster: Any) -> None:
    with engine(cluster, timeout_s=5.0, output_rank=1) as two:
        pids = replica(two)["rank_pids"]
        assert len(set(pids)) == 2
        assert replica(two)["pid"] == pids[0]
        assert replica(two)["devices"] == ["cpu", "cpu"]
        assert all(alive(pid) for pid in pids)
        assert (actors(), groups()) == (2, ["STRICT_PACK"])
        assert number(two.step(ask("add", 2.0))) == 6.0  # 1 * 2 on rank 0, 2 * 2 on rank 1
        assert number(two.step(ask("rank"))) == 1.0  # the output rank's
        assert [number(row) for row in two.step([ask("add", 1.0), ask("add", 5.0)])] == [3.0, 15.0]
        assert two.step(torch.tensor([[4.0]])).flatten().tolist() == [4.0]
        for request, kind in (
            (ask("bad"), RequestError),
            (ask("raise"), ValueError),
            (ask("no room"), MemoryError),
        ):
            with pytest.raises(kind):
                two.step(request)
        with pytest.raises(WeightUpdateError, match="must be updated by a deployment that can"):
            two.update_weights_all({"scale": torch.tensor([2.0])})
        assert replica(two)["restarts"] == 0

        for do, rank, texts in (
            ("kill", 1, ("rank 1, a Ray actor (pid {pid}, node ", "that is gone")),
            ("exit", 0, ("rank 0, a Ray actor (pid {pid}, node ", "last words")),
            (
                "sleep on",
                1,
                ("cannot go on together. rank 0: CommTimeoutError: ", "rank 1: not in"),
            ),
        ):
            future = two.submit(ask(do, rank))
            died(future, *(text.format(pid=pids[rank]) for text in texts))
            pids = ready_again(two, pids)
        died(two.submit(ask("raise late on", 1.0)), "rank 1: ValueError: rank 1 cannot")
        assert replica(two)["restarts"] == 3
    nothing_left(pids)  # closed while it was to start again


def test_what_keeps_ranks_from_starting_is_told_and_leaves_nothing(cluster: Any) -> None:
    with pytest.raises(RequestError, match="loading went wrong on rank 1"):
        engine(cluster, fail_rank=1)
    nothing_left([])
    # The nodes together have room for four ranks, but no node has.
    with pytest.raises(EngineUnavailableError) as caught:
        engine(cluster, tp=4, limits={"startup_timeout_s": 3.0})
    for text in (
        "not ready within startup_timeout_s = 3 s (stage: waiting for room on the Ray cluster",
        f"It needs 4 CPU for its 4 ranks, on one node; the nodes have {CPUS} CPU; {CPUS} CPU, and",
    ):
        assert text in str(caught.value)
    nothing_left([])


@pytest.mark.parametrize("ranks", [1, 2])
def test_requests_tell_their_steps_and_stop_between_them(
    cluster: Any, tmp_path: Path, ranks: int
) -> None:
    hold, start = tmp_path / "hold", torch.zeros(1, 1, 1)
    with engine(cluster, "steps", tp=ranks, hold=str(hold)) as made:
        heard: list[tuple[int, int]] = []
        answer = made.submit(start, lambda *told: heard.append(told)).result(SOON_S)
        assert heard == [(done, STEPS) for done in range(1, STEPS + 1)]
        assert answer["action"].item() == pytest.approx(-1.0)
        assert answer["evaluations"].tolist() == [STEPS]

        heard.clear()
        hold.touch()
        running = made.submit(start, lambda *told: heard.append(told))
        waiting, behind = made.submit(start), made.submit(start)
        until(lambda: heard == [(1, STEPS)])  # they are told while it runs
        assert running.cancel()
        assert waiting.cancel()
        assert isinstance(outcome(waiting), CancelledError)
        assert not running.done()
        hold.unlink()
        assert isinstance(outcome(running), CancelledError)
        assert running.cancelled()
        assert heard[:1] == [(1, STEPS)]
        # One was left after its second step, the other one was never begun.
        assert behind.result(SOON_S)["evaluations"].tolist() == [STEPS + 2 + STEPS]
        found = replica(made)
        assert (found["in_flight"], found["done"], found["failed"]) == (0, 2, 0)
        pids = found.get("rank_pids", [found["pid"]])
    nothing_left(pids)


def test_a_loop_tells_its_end_and_is_stopped_only_while_it_waits(
    cluster: Any, tmp_path: Path
) -> None:
    hold, start = tmp_path / "hold", torch.zeros(1, 1, 1)
    hold.touch()
    with engine(cluster, "steps", tp=1, unit="loop", hold=str(hold)) as made:
        heard: list[tuple[int, int]] = []
        running = made.submit(start, lambda *told: heard.append(told))
        waiting = made.submit(start)
        assert not running.cancel()
        assert waiting.cancel()
        assert isinstance(outcome(waiting), CancelledError)
        hold.unlink()
        assert running.result(SOON_S)["evaluations"].tolist() == [STEPS]
        assert heard == [(STEPS, STEPS)]
        assert made.step(start)["evaluations"].tolist() == [2 * STEPS]
        pids = [replica(made)["pid"]]
    nothing_left(pids)
