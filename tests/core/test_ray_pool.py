"""Replicas on Ray: two nodes of which one dies under load, a local cluster, what is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.deployment import RayConfig, WorkerSupervisorConfig
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.errors import (
    CheckpointError,
    ConfigError,
    EngineUnavailableError,
    PluginError,
    SessionReplicaDied,
)
from phyai.plugins import find
from phyai.testing.sandbox import Sandbox
from phyai.types import Observation
from tests.core.ray_token import TOKEN

pytestmark = pytest.mark.slow

STORE_BYTES = 200 * 2**20
# Of the test's cluster: a node that is silent for 2 s is dead. Ray's own patience is longer.
DETECTION = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 4,
}
SOON_S = 90.0  # these machines are busy: nothing here is about speed


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the adapter, which this process and every Ray worker see."""
    folder = tmp_path_factory.mktemp("ray") / "site"
    sandbox = Sandbox(folder)
    sandbox.adapter(
        "obedient",
        model=Path(__file__).with_name("ray_model.py").read_text(encoding="utf-8"),
        more=", capabilities={'sessions': True}",
    )
    with pytest.MonkeyPatch.context() as patch, sandbox.visible():
        patch.setenv("PYTHONPATH", str(folder))
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        yield folder


@pytest.fixture
def cluster(site: Path) -> Iterator[Any]:
    """A head and another node on this machine, each with room for two replicas."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={**node, "_system_config": DETECTION})
    try:
        made.add_node(**node)
        yield made
    finally:
        made.shutdown()


def engine(deployment: DeploymentConfig, **options: Any) -> Engine:
    args = find("obedient").load_args()(**options)
    config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="float32"))
    return Engine(EngineArgs("obedient", args, config), deployment=deployment)


def on(made: Any, **options: Any) -> DeploymentConfig:
    limits = {"heartbeat_s": 0.5, "max_restarts": 3} | options.pop("limits", {})
    return DeploymentConfig.ray(
        address=made.address,
        process_config=WorkerSupervisorConfig(**limits),
        **{"replica_count": 2} | options,
    )


def order(prompt: str = "", session: str | None = None, seq: int = 0) -> Observation:
    options = {} if session is None else {"session_id": session, "seq": seq}
    return Observation(state=[1.0, 0.0], prompt=prompt, options=options)


def answer(result: Any) -> tuple[float, int]:
    ((way, pid),) = result.actions.tolist()
    return way, int(pid)


def replicas(of: Engine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = of.stats()["replicas"]
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.1)


def ready(of: Engine) -> bool:
    return all(replica["state"] == "ready" for replica in replicas(of))


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state != "Z"
    return False


def family(pid: int) -> set[int]:
    """Return the ids of a process's descendants."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = {int(p): int(q) for p, q in (line.split() for line in listed.stdout.splitlines())}
    found = {pid}
    while more := {p for p, q in parents.items() if q in found} - found:
        found |= more
    return found - {pid}


# ---------------------------------------------------------------- two nodes


def test_a_node_that_dies_takes_only_its_own_requests(cluster: Any) -> None:
    head = cluster.head_node.node_id
    with engine(on(cluster)) as two:
        by_node = {replica["node_id"]: replica for replica in replicas(two)}
        assert len(by_node) == 2  # spread
        (lost_node,) = set(by_node) - {head}
        stays, lost = by_node[head], by_node[lost_node]

        # Sessions stay where they began.
        homes = {}
        for name in ("a", "b"):
            pids = {answer(two.step(order(session=name, seq=seq)))[1] for seq in range(3)}
            (homes[name],) = pids
        assert set(homes.values()) == {stays["pid"], lost["pid"]}

        # Errors of the model are requests' errors.
        with pytest.raises(KeyError, match="of the model") as caught:
            two.step(order("raise of the model"))
        assert "raise KeyError(rest)" in str(caught.value.__cause__)

        running = [two.submit(order("sleep 8")) for _ in range(2)]
        waiting = [two.submit(order()) for _ in range(10)]
        until(lambda: sorted(r["in_flight"] for r in replicas(two)) == [6, 6])
        (node,) = [n for n in cluster.list_all_nodes() if n.node_id == lost_node]
        cluster.remove_node(node, allow_graceful=False)

        good, bad = [], []
        for future in running + waiting:
            error = future.exception(timeout=SOON_S)
            (good if error is None else bad).append(error or answer(future.result())[1])
        assert good == [stays["pid"]] * 6
        assert [type(error) for error in bad] == [EngineUnavailableError] * 6
        assert {error.reason for error in bad} == {"worker_died"}
        assert f"pid {lost['pid']}, node {lost['node']}" in str(bad[0])

        # Others go on, the lost session says so, and the replica comes back where there is room.
        names = {home: name for name, home in homes.items()}
        assert answer(two.step(order(session=names[stays["pid"]], seq=3))) == (4.0, stays["pid"])
        with pytest.raises(SessionReplicaDied, match="lost with its replica"):
            two.step(order(session=names[lost["pid"]], seq=3))
        until(lambda: ready(two))
        assert {replica["node_id"] for replica in replicas(two)} == {head}
        assert sorted(replica["restarts"] for replica in replicas(two)) == [0, 1]
        assert {answer(two.step(order()))[1] for _ in range(4)} == {r["pid"] for r in replicas(two)}
        assert answer(two.step(order(session=names[lost["pid"]], seq=0)))[0] == 1.0
        pids = [replica["pid"] for replica in replicas(two)]
    until(lambda: not any(alive(pid) for pid in pids))  # the cluster goes on without them

    no_room_is_waited_for_and_then_an_error(cluster)


def no_room_is_waited_for_and_then_an_error(cluster: Any) -> None:
    much = on(cluster, num_cpus=64, replica_count=1, limits={"startup_timeout_s": 3.0})
    with pytest.raises(EngineUnavailableError, match=r"stage: waiting for room.*needs 64 CPU; the"):
        engine(much)


# ---------------------------------------------------------------- a local cluster


def test_a_local_cluster_ends_with_its_engine(site: Path) -> None:
    before = family(os.getpid())
    limits = WorkerSupervisorConfig(request_timeout_s=4.0, max_restarts=1, heartbeat_s=0.5)
    local = DeploymentConfig.ray(
        replica_count=2,
        process_config=limits,
        ray_config=RayConfig(object_store_bytes=STORE_BYTES),
    )
    with engine(local, load_s=6.0) as two:  # longer than request_timeout_s: loading is not hanging
        assert two.mode == "ray"
        image = np.zeros((224, 224, 3), np.uint8)
        looking = Observation(state=[1.0, 0.0], images=dict.fromkeys("abc", image))
        results = [future.result() for future in [two.submit(looking) for _ in range(4)]]
        first = {replica["pid"] for replica in replicas(two)}
        assert {answer(result)[1] for result in results} == first
        two.step(order(session="a", seq=0))
        two.reset_session("a")
        assert answer(two.step(order(session="a", seq=0)))[0] == 1.0  # its row was forgotten

        # A process that ends in a request, with its last words; the other one answers.
        futures = [two.submit(order("exit 3")), two.submit(order("sleep 1"))]
        error = futures[0].exception(timeout=SOON_S)
        assert isinstance(error, EngineUnavailableError)
        assert "a last word" in str(error)
        assert answer(futures[1].result(timeout=SOON_S))[1] in first
        until(lambda: ready(two))
        assert sorted(replica["restarts"] for replica in replicas(two)) == [0, 1]

        # Stuck, once with the GIL and once without: both are killed, one has no restarts left.
        second = {replica["pid"] for replica in replicas(two)}
        stuck = [two.submit(order("gil 600")), two.submit(order("sleep 600"))]
        for future in stuck:
            error = future.exception(timeout=SOON_S)
            assert isinstance(error, EngineUnavailableError)
            assert "stuck" in str(error)
        until(lambda: not any(alive(pid) for pid in second))
        until(lambda: sorted(r["state"] for r in replicas(two)) == ["dead", "ready"])
        kept = two.step(order())
        begun = family(os.getpid()) - before
        assert len(begun) >= 4
    until(lambda: not any(alive(pid) for pid in begun))
    assert answer(kept)[0] == 1.0  # results are memory of this process
    late: Future[Any] = two.submit(order())
    assert getattr(late.exception(), "reason", None) == "closed"


def test_a_start_that_fails_leaves_nothing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = family(os.getpid())
    local = DeploymentConfig.ray(replica_count=2, address="local")
    with pytest.raises(CheckpointError, match="Bring one") as caught:
        engine(local, fail=True)
    assert "ray_model" in str(caught.value.__cause__) or "model.py" in str(caught.value.__cause__)
    # As if the node had another phyai.
    monkeypatch.setattr("phyai.deployment.ray_pool.__version__", "0.0.1")
    with pytest.raises(PluginError, match=r"must have version 0\.0\.1.*Install the same"):
        engine(local)
    with pytest.raises(ConfigError, match=r"must be a cluster that can be reached; got '127"):
        engine(DeploymentConfig.ray(address="127.0.0.1:1"))
    until(lambda: not any(alive(pid) for pid in family(os.getpid()) - before))


KILLED = """
import sys, time
from phyai import DeploymentConfig, Engine, EngineArgs
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.plugins import find
from phyai.types import Observation

config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="float32"))
args = EngineArgs("obedient", find("obedient").load_args()(), config)
engine = Engine(args, deployment=DeploymentConfig.ray(replica_count=2, address="local"))
for prompt in ("gil 600", "sleep 600"):
    engine.submit(Observation(state=[1.0, 0.0], prompt=prompt))
time.sleep(1.0)
print("up", flush=True)
time.sleep(600)
"""


def test_an_engine_that_is_killed_leaves_nothing(site: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == "up"
        left = family(process.pid)
        assert len(left) >= 4
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: not any(alive(pid) for pid in left))
