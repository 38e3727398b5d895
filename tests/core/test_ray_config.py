"""Ray without Ray: configuration, the form of messages, and what an environment without it says."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phyai import DeploymentConfig
from phyai.adapter import AdapterArgs
from phyai.deployment import RayConfig, WorkerSupervisorConfig, resolve_mode
from phyai.deployment.pool import PoolSpec
from phyai.deployment.ray_actor import Host
from phyai.deployment.ray_cluster import Resources
from phyai.deployment.ray_frame import FAILURE, RESULT, Reply, pack, reply, unpack
from phyai.deployment.ray_pool import RayPool
from phyai.deployment.ray_team import DOUBT_S, Rank, Team, how_it_died
from phyai.deployment.values import WireError, decode, encode
from phyai.engine_config import DeviceConfig, EngineConfig, ParallelConfig
from phyai.errors import CommTimeoutError, ConfigError, MissingDependency, RequestError

CPU = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="float32"))


def spec(config: EngineConfig = CPU, **options: Any) -> PoolSpec:
    deployment = DeploymentConfig.ray(replica_count=3, **options)
    return PoolSpec("toy", AdapterArgs(), config, "1.0", deployment, ())


def test_ray_deployment() -> None:
    limits = WorkerSupervisorConfig(max_restarts=1)
    config = DeploymentConfig.ray(
        replica_count=2, address="10.0.0.5:6379", num_cpus=4, num_gpus=0.5, process_config=limits
    )
    assert (config.mode, config.replica_count, config.supervision) == ("ray", 2, limits)
    assert config.ray_config == RayConfig("10.0.0.5:6379", 4, 0.5)
    assert resolve_mode(config, ParallelConfig(), {}) == "ray"
    assert hash(config) == hash(replace(config))
    own = RayConfig(object_store_bytes=2**28)
    assert DeploymentConfig.ray(ray_config=own).ray_config == own


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"address": ""}, r"\.address must be a non-empty str or None; got ''"),
        ({"address": "ray://head:10001"}, r"\.address must be HOST:PORT.*Client.*not supported"),
        ({"num_cpus": -1}, r"\.num_cpus must be from 0 to 1, or a whole number; got -1"),
        ({"num_cpus": 1.5}, r"\.num_cpus must be from 0 to 1"),
        ({"num_cpus": None}, r"\.num_cpus must be from 0 to 1"),
        ({"num_gpus": float("nan")}, r"\.num_gpus must be from 0 to 1"),
        ({"num_gpus": True}, r"\.num_gpus must be from 0 to 1"),
        ({"object_store_bytes": 1}, r"\.object_store_bytes must be an int >= 83886080 or None"),
    ],
)
def test_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"RayConfig{message}"):
        RayConfig(**values)


def test_ray_places_replicas_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"devices must be None in mode 'ray'.*num_gpus"):
        DeploymentConfig.ray(devices=("cpu",))
    with pytest.raises(ConfigError, match=r"ray_config must be None in mode 'local'"):
        DeploymentConfig.local(ray_config=RayConfig())
    indexed = CPU.replace(device=CPU.device.replace(target="cuda:1"))
    with pytest.raises(ConfigError, match=r"target must be 'cpu' or 'cuda' in mode 'ray'"):
        RayPool(spec(indexed))
    two = CPU.replace(parallel=ParallelConfig(tp_size=2))
    monkeypatch.setattr("phyai.deployment.ray_pool.import_ray", lambda: None)  # takes seconds
    pool = RayPool(spec(two))
    assert pool.spec.devices == (("cpu", "cpu"),) * 3
    pool.close()
    with pytest.raises(
        ConfigError, match=r"num_cpus or num_gpus must be above 0.*got 0 and 2 ranks"
    ):
        RayPool(spec(two, num_cpus=0))


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependency, match=r"mode 'ray' needs Ray.*'phyai-core\[ray\]'"):
        RayPool(spec())


def test_what_a_replica_takes() -> None:
    assert Resources(2.0, 0.0).as_bundle() == {"CPU": 2.0}
    assert Resources(0.0, 0.5).as_bundle() == {"GPU": 0.5}


@pytest.mark.parametrize("shape", [(), (0,), (3,), (224, 224, 3)])
def test_a_message_is_one_piece(shape: tuple[int, ...]) -> None:
    value = {"image": np.full(shape, 7, np.uint8), "far": np.arange(6.0)[::2], "n": 1}
    frame = pack(*encode(value))
    assert type(frame) is bytes  # what Ray carries without pickle
    again = decode(*unpack(frame))
    assert again["n"] == 1
    for name in ("image", "far"):
        np.testing.assert_array_equal(again[name], value[name])
        assert again[name].flags.writeable


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frame: b"",
        lambda frame: frame[:8],
        lambda frame: b"x" + frame[1:],
        lambda frame: frame[:-1],
        lambda frame: frame[:4] + b"\xff\xff\xff\x7f" + frame[8:],
        lambda frame: frame[:8] + b"\xff" * 8 + frame[16:],
    ],
)
def test_garbage_is_no_message(spoil: Any) -> None:
    frame = pack(*encode({"x": np.zeros(64)}))
    with pytest.raises(WireError, match="pack"):
        unpack(spoil(frame))


def test_a_reply_has_the_steps_of_its_request() -> None:
    steps = ((1, 3), (2, 3), (3, 3))
    found = Reply.read(reply(RESULT, *encode(np.arange(5.0)), steps=steps))
    assert (found.kind, found.steps) == (RESULT, steps)
    np.testing.assert_array_equal(decode(found.body, found.buffers), np.arange(5.0))
    assert Reply.read(reply(FAILURE, b"text")).steps == ()
    for cut in (b"", reply(RESULT, b"text", steps=steps)[:20], reply(RESULT, b"text")[:-70]):
        with pytest.raises(WireError, match=r"pack|reply"):
            Reply.read(cut)


def test_ranks_that_cannot_all_be_made_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    killed: list[str] = []
    given_back: list[str] = []

    class Remote:
        def options(self, **options: Any) -> Remote:
            return self

        def remote(self) -> str:
            if made:
                raise RuntimeError("no more of them")
            made.append("actor")
            return "actor"

    class Ray:
        kill = staticmethod(killed.append)

        def remote(self, cls: type) -> Remote:
            return Remote()

    class Cluster:
        give_back = staticmethod(given_back.append)

        def reserve(self, resources: Resources, ranks: int) -> tuple[str, list[dict[str, Any]]]:
            return "group", [{} for _ in range(ranks)]

    monkeypatch.setattr("phyai.deployment.ray_pool.import_ray", Ray)
    pool = RayPool(spec(CPU.replace(parallel=ParallelConfig(tp_size=2))))
    cluster: Any = Cluster()
    pool._connection = cluster
    (replica, *_) = pool.dispatch.replicas
    pool._begin_team(replica)
    assert (killed, given_back) == (["actor"], ["group"])
    assert (replica.state, pool._teams) == ("restarting", [])
    assert "no more of them" in (replica.last_error or "")


def test_an_answer_that_cannot_be_read_ends_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setattr("phyai.deployment.ray_pool.import_ray", lambda: nothing)
    pool = RayPool(spec())
    (replica, *_) = pool.dispatch.replicas
    found = Team(replica, nothing)
    found.ranks.append(Rank(found, 0, nothing))
    pool._teams.append(found)

    def answered(_: Rank) -> None:
        Reply.read(b"")

    pool._readable(answered, found.lead)
    assert found.gone
    assert replica.state == "restarting"
    assert "cannot be read" in (replica.last_error or "")
    pool._readable(answered, found.lead)  # what it said is heard once more: nothing to end


# ---------------------------------------------------------------- whose fault it was

LATE = CommTimeoutError("every rank must arrive", ranks=(1,))
GONE = "a Ray actor (pid 7, node 10.0.0.5) that is gone: killed."


def team(*ranks: dict[str, Any], ready: bool = True) -> Team:
    """Return the actors of a replica of which the first gave up at second 10, if any did."""
    nothing: Any = None
    made = Team(nothing, nothing, ready=ready)
    made.ranks += [Rank(made, number, nothing, **state) for number, state in enumerate(ranks)]
    if any("error" in state for state in ranks):
        made.gave_up_at = 10.0
    return made


@pytest.mark.parametrize(
    ("found", "text", "error"),
    [
        (team({}, {"end": GONE}), f"rank 1, {GONE}", None),
        (team({"error": LATE}, {"end": GONE}), f"rank 1, {GONE}", None),
        (team({"error": LATE}, {"error": LATE}), "CommTimeoutError: every rank must arrive", None),
        (
            team({"error": LATE}, {"error": RequestError("no")}, ready=False),
            "Error: no",
            RequestError,
        ),
        (team({}, {"error": RequestError("bad file")}, ready=False), "bad file", RequestError),
        (team({"end": GONE}), GONE, None),
        (team({"error": LATE}, ready=False), "that could not start: every rank", CommTimeoutError),
    ],
    ids=["it died", "it died first", "all told", "its own", "at the start", "alone", "alone early"],
)
def test_the_rank_whose_fault_it_was_is_named_at_once(
    found: Team, text: str, error: type[Exception] | None
) -> None:
    assert found.clear_whose_fault(10.0)
    why, cause = found.ending()
    assert text in why
    assert type(cause) is (error or type(None))


def test_a_rank_that_gave_up_waits_for_news_of_the_others() -> None:
    for late in (team({}, {}), team({"error": LATE}, {}), team({}, {"error": LATE}, ready=False)):
        assert not late.clear_whose_fault(10.0)
    late = team({"error": LATE}, {})
    assert not late.clear_whose_fault(10.0 + DOUBT_S - 0.1)
    assert late.clear_whose_fault(10.0 + DOUBT_S)
    assert late.ending()[0].startswith("ranks that cannot go on together. rank 0: CommTimeout")


def test_an_actors_end_in_words() -> None:
    host = Host(7, "node", "actor", "10.0.0.5", "elsewhere", "")
    error = RuntimeError(
        "The actor died.\n  pid: 7\nThe worker was killed. Some common causes: a, b"
    )
    assert how_it_died(host, error) == (
        "a Ray actor (pid 7, node 10.0.0.5) that is gone: The actor died. The worker was killed."
    )
