"""Ranks of a replica: what rank 0 says all do, and what each of them gets when one cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from phyai.engine_config import KernelConfig, ParallelConfig
from phyai.engine_core import EngineCore
from phyai.errors import (
    CommTimeoutError,
    ConfigError,
    EngineUnavailableError,
    RequestError,
    WeightUpdateError,
)
from phyai.kernel_setup import apply_policy
from phyai.kernels import KernelTable
from phyai.parallel import Group, Mesh, ParallelService
from phyai.ranks.launched import join_launched
from phyai.ranks.messages import FIRST, LARGE, Message, receive
from phyai.ranks.spawned import IDLE_S
from tests.core.rank_adapter import PLUGIN_ID, ask, installed, number
from tests.core.rank_engines import all_step, config, ranks
from tests.core.thread_ranks import on_all, services


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("ranked")) as cls:
        yield cls


def test_every_rank_returns_rank_0s_request(args: Any) -> None:
    with ranks(args()) as engines:
        for value in (2.0, 3.0):
            assert [number(one) for one in all_step(engines, ask("add", value))] == [3 * value] * 2
        assert [vars(one.core.adapter)["prepared"] for one in engines] == [2, 0]
        rows = all_step(engines, [ask("add", 1.0), ask("add", 2.0)])
        assert [[number(row) for row in got] for got in rows] == [[3.0, 6.0]] * 2
        assert set(rows[1][0].timing) >= {"encode", "solve"}
        tensors = all_step(engines, torch.tensor([[1.0], [2.0]]))
        assert [got.flatten().tolist() for got in tensors] == [[1.0, 2.0]] * 2


def test_result_of_the_output_rank_counts(args: Any) -> None:
    with ranks(args(), output_rank=1) as engines:
        assert [number(one) for one in all_step(engines, ask("rank"))] == [1.0, 1.0]
    with ranks(args()) as engines:
        assert [number(one) for one in all_step(engines, ask("rank"))] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("request_", "kind", "text"),
    [
        (ask("bad"), RequestError, "prompt must be good"),
        (ask("raise", 4.0), ValueError, "no such thing as 4"),
        (ask("late"), ValueError, "after it"),
        (ask("no room"), MemoryError, "out of it"),
        (ask("stays"), RequestError, "meta[0] must be able to travel"),
        (ask("add", float("nan")), Exception, "finite"),
    ],
    ids=["request", "model", "after a collective", "memory", "meta that cannot travel", "nan"],
)
def test_what_all_ranks_fail_with_alike_harms_nothing(
    args: Any, request_: Any, kind: type[Exception], text: str
) -> None:
    with ranks(args()) as engines:
        for error in all_step(engines, request_):
            assert isinstance(error, kind), repr(error)
            assert text in str(error)
        assert [number(one) for one in all_step(engines, ask("add", 1.0))] == [3.0, 3.0]


def test_a_rank_that_fails_alone_ends_the_replica_and_is_named(args: Any) -> None:
    with ranks(args()) as engines:
        errors = all_step(engines, ask("raise late on", 1.0))
        assert "rank 1: ValueError: rank 1 cannot" in str(errors[0])
        for error in errors:
            assert isinstance(error, EngineUnavailableError)
            assert error.reason == "poisoned"
        for error in all_step(engines, ask("add", 1.0)):
            assert isinstance(error, EngineUnavailableError)
            assert "Start all ranks again" in str(error)


def test_a_rank_that_does_not_arrive_is_named_after_the_timeout(args: Any) -> None:
    with ranks(args(), ParallelConfig(tp_size=2, timeout_s=0.3)) as engines:
        lead, other = all_step(engines, ask("raise on", 1.0))
        assert isinstance(lead, CommTimeoutError)
        assert lead.ranks == (1,)
        assert isinstance(other, EngineUnavailableError)
        assert "got rank 1: ValueError: rank 1 cannot, and none of others" in str(other)
        assert isinstance(other.__cause__, ValueError)
        again = all_step(engines, ask("add", 1.0))
        assert "ranks must arrive; missing 1" in str(again[0])


def test_joined_requests_reach_every_rank(args: Any) -> None:
    with ranks(args(), batch_wait_ms=2000.0) as engines:

        def submit(rank: int) -> list[Any]:
            futures: list[Future[Any]] = [
                engines[rank].submit(ask("add", value)) for value in (1.0, 2.0, 3.0, 4.0)
            ]
            return [number(future.result(30)) for future in futures]

        assert on_all(2, submit) == [[3.0, 6.0, 9.0, 12.0]] * 2
        assert engines[0].core.batches.as_dict()["rows"] == {4: 1}
        assert engines[1].core.batches.as_dict()["rows"] == {4: 1}


def test_a_joined_batch_that_has_no_room_runs_one_by_one_everywhere(args: Any) -> None:
    with ranks(args(), batch_wait_ms=500.0) as engines:

        def submit(rank: int) -> list[BaseException | None]:
            futures = [engines[rank].submit(ask("no room", value)) for value in (1.0, 2.0)]
            return [future.exception(30) for future in futures]

        for errors in on_all(2, submit):
            assert [type(error) for error in errors] == [MemoryError] * 2
        assert [one.core.batches.count for one in engines] == [3, 3]


def test_weights_change_on_all_ranks_or_on_none(args: Any) -> None:
    with ranks(args()) as engines:

        def update(value: float, name: str = "scale") -> Callable[[int], Any]:
            items = {name: torch.tensor([value])}
            return lambda rank: engines[rank].update_weights(items.items() if rank == 0 else ())

        assert on_all(2, update(2.0)) == [1, 1]
        assert [number(one) for one in all_step(engines, ask("add", 1.0))] == [6.0, 6.0]
        for error in on_all(2, update(3.0, "unknown")):
            assert isinstance(error, WeightUpdateError)
            assert error.__cause__ is None
        assert [number(one) for one in all_step(engines, ask("add", 1.0))] == [6.0, 6.0]
        bad: Any = {"scale": "no tensor"}
        for error in on_all(2, lambda rank: engines[rank].update_weights(bad.items())):
            assert isinstance(error, WeightUpdateError)
            assert "'scale' must be a tensor with data; got str" in str(error)
        errors = on_all(2, update(14.0))
        assert "rank 1: WeightUpdateError: no room on rank 1" in str(errors[0])
        assert all(isinstance(error, EngineUnavailableError) for error in errors)


def test_different_calls_are_an_error_that_names_both(args: Any) -> None:
    with ranks(args()) as engines:

        def call(rank: int) -> Any:
            if rank == 0:
                return engines[0].update_weights({"scale": torch.ones(1)}.items())
            return engines[1].step(None)

        done, error = on_all(2, call)
        assert done == 1
        assert "update_weights_all on rank 0 where rank 1 called a request" in str(error)


def test_rank_0_that_closes_lets_the_others_go(args: Any) -> None:
    with ranks(args()) as engines:
        _, error = on_all(2, lambda r: engines[1].step(None) if r else engines[0].close())
        assert isinstance(error, EngineUnavailableError)
        assert error.reason == "closed"


def test_four_ranks_on_two_axes(args: Any) -> None:
    with ranks(args(), ParallelConfig(tp_size=2, cfg_size=2, timeout_s=10.0)) as engines:
        # rank = 2 * cfg rank + tp rank, so each tp group adds up its own ranks
        assert [number(one) for one in all_step(engines, ask("add", 1.0))] == [3.0, 3.0, 7.0, 7.0]


def test_a_rank_that_cannot_load_fails_the_others(args: Any) -> None:
    groups = services(Mesh(tp=2), 5.0)

    def start(rank: int) -> EngineCore:
        return EngineCore(PLUGIN_ID, args(fail_rank=1), config(), parallel=groups[rank])

    lead, other = on_all(2, start)
    assert isinstance(lead, CommTimeoutError)
    assert lead.ranks == (1,)
    assert isinstance(other, RequestError)


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("size", [0, 1, 100, FIRST, LARGE - 4, LARGE, 3 * LARGE + 4])
def test_messages_arrive_whole(size: int) -> None:
    array = np.arange(size, dtype=np.uint8)
    value = {"a": array, "b": [torch.ones(3, 5), "text" * 2000], "c": (1, None)}
    control = [one.control for one in services(Mesh(tp=3))]

    def exchange(rank: int) -> Any:
        if rank == 1:
            return Message(4, value).send(control[1], 1)
        return receive(control[rank], 1)

    first, _, last = on_all(3, exchange)
    for kind, got in (first, last):
        assert kind == 4
        assert np.array_equal(got["a"], array)
        assert torch.equal(got["b"][0], torch.ones(3, 5))
        assert got["c"] == (1, None)
        got["a"][:1] = 7  # memory of its own, to write to
    assert array[:1].tolist() in ([], [0])


def test_what_cannot_travel_is_told_before_anything_is_sent() -> None:
    with pytest.raises(RequestError, match=r"weights\['a'\] must be able to travel"):
        Message(1, {"a": object()}, where="weights")
    Message(1, {}).send(Group("control"))  # one rank alone has nobody to tell


# ---------------------------------------------------------------- launched ranks

LAUNCHED = {
    "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"RANK": None}, "got none of RANK"),
        ({"MASTER_ADDR": None, "MASTER_PORT": ""}, "got none of MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE must be the ranks of one replica, .* = 2; got 4"),
        ({"RANK": "2"}, r"RANK must be in \[0, 2\); got 2"),
        ({"RANK": "one"}, "RANK must be an integer >= 0"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be an integer"),
    ],
)
def test_variables_of_a_launcher_are_checked(changes: dict[str, Any], text: str) -> None:
    environ = {k: v for k, v in {**LAUNCHED, **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=text):
        join_launched(config(), environ)


def test_launched_ranks_wait_for_rank_0_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def start(mesh: Mesh, rank: int, device: torch.device, **limits: Any) -> ParallelService:
        asked.update(limits, rank=rank)
        return ParallelService.single()

    monkeypatch.setattr(ParallelService, "start", start)
    join_launched(config(), LAUNCHED)
    assert asked == {"rank": 1, "timeout_s": 5.0, "control_timeout_s": IDLE_S}


def test_one_rank_needs_no_launcher() -> None:
    alone = config(ParallelConfig())
    assert join_launched(alone, {})[0] is alone
    assert join_launched(alone, {})[1].mesh.world == 1


def test_ranks_do_not_measure_kernels_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phyai.kernels.cpu.has_16_bit_arithmetic", lambda: True)
    tuners: dict[int, Any] = {}
    for tp_size in (1, 2):
        table: Any = KernelTable(context={"device.type": "cpu"})
        chosen = config(ParallelConfig(tp_size=tp_size))
        apply_policy(table, chosen)
        tuners[tp_size] = table._tuner
        measures = chosen.replace(kernel=KernelConfig(profile="autotune"))
        if tp_size == 1:
            apply_policy(table, measures)
    assert tuners[1] is not None
    assert tuners[2] is None
    with pytest.raises(ConfigError, match=r"must be 'static' .*; got 'autotune' with 2 ranks"):
        apply_policy(table, measures)


@pytest.mark.parametrize(
    ("parallel", "text"),
    [
        (ParallelConfig(tp_size=2), "must be those of the ranks that were started"),
        (ParallelConfig(cfg_size=2), "must be those of the ranks that were started"),
    ],
)
def test_sizes_without_their_ranks_are_refused(
    args: Any, parallel: ParallelConfig, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineCore(PLUGIN_ID, args(), config(parallel))
