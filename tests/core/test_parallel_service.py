"""Mesh, groups and collectives: one rank, ranks in processes, ranks that do not come."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import CommTimeoutError, ConfigError, PluginContractError
from phyai.parallel import Group, Mesh, ParallelService, check_axes, starting, watch
from phyai.parallel.watch import Watch
from tests.core.parallel_ranks import SHORT_S
from tests.core.process_ranks import on_processes

RANKS = "tests.core.parallel_ranks"


# ---------------------------------------------------------------- mesh and axes


def test_tp_ranks_are_neighbours_and_cfg_ranks_a_stride_apart() -> None:
    mesh = Mesh(cfg=2, tp=4)
    assert [mesh.coordinates(rank) for rank in range(8)] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)
    ]  # fmt: skip
    assert mesh.groups("tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("cfg") == ((0, 4), (1, 5), (2, 6), (3, 7))
    for axis in ("tp", "cfg"):
        for rank in range(8):
            assert mesh.ranks(axis, rank) in mesh.groups(axis)
            assert rank in mesh.ranks(axis, rank)


def test_no_such_rank_size_or_axis() -> None:
    with pytest.raises(ConfigError, match=r"rank must be in \[0, 2\) of cfg 1 x tp 2; got 2"):
        Mesh(tp=2).coordinates(2)
    with pytest.raises(ConfigError, match="mesh axis tp must be an int of at least 1; got 0"):
        Mesh(tp=0)
    with pytest.raises(ConfigError, match="mesh axis must be one of cfg, tp; got 'dp'"):
        Mesh().ranks("dp", 0)


def test_an_axis_must_be_declared() -> None:
    check_axes(Mesh(), "mine", ())
    check_axes(Mesh(cfg=2, tp=2), "mine", {"tp", "cfg"})
    with pytest.raises(ConfigError, match=r"'mine' must .*; got tp_size 2, supported: none\. Set"):
        check_axes(Mesh(tp=2), "mine", ())
    with pytest.raises(ConfigError, match="got cfg_size 2, supported: tp_size"):
        check_axes(Mesh(cfg=2, tp=2), "mine", {"tp"})
    with pytest.raises(ConfigError, match=r"cfg_size must be 1 or 2, .*; got 3. Share the layers"):
        check_axes(Mesh(cfg=3), "mine", {"tp", "cfg"})
    with pytest.raises(PluginContractError, match=r"must be among cfg, tp; got 'pp'"):
        check_axes(Mesh(), "mine", {"pp"})


@pytest.mark.slow
def test_one_rank_starts_nothing_and_counts_nothing() -> None:
    probe = (
        "import sys, torch; from phyai.parallel import Mesh, ParallelService\n"
        "one = ParallelService.start(Mesh(), 0, torch.device('cpu'))\n"
        "x = torch.ones(2)\n"
        "assert one.tp.all_reduce(x) is x and one.world.broadcast(x) is x\n"
        "assert one.cfg.all_gather(x).shape == (1, 2); one.world.barrier(); one.close()\n"
        "assert all(t.collectives == t.payload_bytes == 0 for t in one.counters.values())\n"
        "import torch.distributed as dist; assert not dist.is_initialized()\n"
        "assert 'phyai.parallel.process_groups' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


# ---------------------------------------------------------------- who is missing


class Store:
    """What ranks write, in this process."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.gone = False

    def set(self, key: str, value: str) -> None:
        self._check()
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._check()
        return self.held[key]

    def add(self, key: str, amount: int) -> int:
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        self._check()
        return all(key in self.held for key in keys)

    def _check(self) -> None:
        if self.gone:
            raise RuntimeError("store is gone")


def said_of(states: list[str], *, gone: bool = False) -> CommTimeoutError:
    """Return what rank 0 says when the others are in these states."""
    store: Any = Store()
    watches = [Watch(store, "start", rank, len(states)) for rank in range(len(states))]
    for one, state in zip(watches, states, strict=True):
        if state.startswith("at "):
            one.enter(state.removeprefix("at "))
        if state == "closed":
            one.close()
        elif state != "dead":
            one.begin()
    store.gone = gone
    try:
        return watches[0].problem("tp collective 3", 5.0, RuntimeError("Connection closed. Bye"))
    finally:
        for one in watches:
            one.close()


@pytest.mark.parametrize(
    ("states", "ranks", "words"),
    [
        (["dead"], (1,), "got rank 1: no answer (ended, or stopped) (seen by"),
        (["busy"], (1,), "got rank 1: not in a collective"),
        (["closed"], (1,), "got rank 1: closed"),
        (
            ["at cfg collective 1", "busy", "dead"],
            (2, 3),
            "rank 3: no answer (ended, or stopped), rank 2: not in a collective",
        ),
        (["at cfg collective 1"], (1,), "rank 1: at cfg collective 1 instead"),
        (["at tp collective 3"], (), "got Connection closed (seen by rank 0"),
    ],
)
def test_the_error_names_who_keeps_the_others_waiting(
    states: list[str], ranks: tuple[int, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "TICK_S", 0.01)
    monkeypatch.setattr(watch, "GRACE_S", 0.5)
    error = said_of(["at tp collective 3", *states])
    assert error.ranks == ranks
    assert words in str(error)
    assert "every rank must arrive at tp collective 3 within 5 s" in str(error)


def test_without_a_store_nobody_is_blamed() -> None:
    error = said_of(["at tp collective 3", "busy"], gone=True)
    assert error.ranks == ()
    assert "Connection closed; the ranks cannot be asked" in str(error)


# ---------------------------------------------------------------- processes


@pytest.mark.slow
def test_collectives_of_two_by_two_ranks(tmp_path: Path) -> None:
    found = on_processes(f"{RANKS}:collectives", (2, 2), tmp_path)
    mine = [rank["mine"] for rank in found]
    columns = found[0]["column"] + found[1]["column"] + found[2]["column"] + found[3]["column"]
    for rank, seen in enumerate(found):
        cfg, tp = divmod(rank, 2)
        assert seen["coordinates"] == (cfg, tp)
        assert seen["members"] == ((2 * cfg, 2 * cfg + 1), (tp, tp + 2))
        np.testing.assert_array_equal(seen["tp_sum"], mine[2 * cfg] + mine[2 * cfg + 1])
        # In float32 2 + 1/128 and 2 + 5/128; bfloat16 has steps of 1/64 there.
        assert seen["low"].tolist() == [[2.0, 2.03125][cfg]] * 3
        assert seen["counted_ints"].tolist() == [4 * cfg + 1, 2]
        np.testing.assert_array_equal(seen["column_sum"], columns)
        assert seen["cfg_all"].tolist() == [[[tp]], [[tp + 2]]]
        assert (seen["told"].tolist(), seen["host"].tolist()) == ([3], [7])
        assert seen["empty"] == (4, 0)
        assert seen["counters"] == {
            "tp": (3, 257 * 4 + 3 * 2 + 2 * 8),
            "cfg": (1, 8),
            "world": (2, 12 * 4 + 8),
            "control": (1, 8),  # a gather of nothing is none
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "axis", "mesh", "words"),
    [
        ("kill", "cfg", (2, 2), "rank 3: no answer"),
        ("sleep", "tp", (2, 2), "rank 3: not in a collective"),
        ("limit", "control", (1, 2), "within 0.5 s; got rank 1: not in a collective"),
    ],
)
def test_a_rank_that_does_not_come_is_named(
    how: str, axis: str, mesh: tuple[int, int], words: str, tmp_path: Path
) -> None:
    *others, lost = on_processes(
        f"{RANKS}:lose", mesh, tmp_path, how, mesh[0] * mesh[1] - 1, axis, timeout_s=SHORT_S
    )
    assert lost is None
    for ranks, text in others:
        assert ranks == (len(others),)
        assert words in text


@pytest.mark.slow
def test_a_process_group_that_is_there_is_used(tmp_path: Path) -> None:
    for rank, seen in enumerate(on_processes(f"{RANKS}:within_a_group", (1, 2), tmp_path)):
        assert seen["axes"] == (1, (0, 1))
        assert seen["sum"].tolist() == seen["outer"].tolist() == [2.0, 2.0]
        assert seen["counted"] == {"tp": 0, "cfg": 1, "world": 0, "control": 0}
        assert (seen["compiled"].tolist(), seen["compiled_calls"]) == ([14.0] * 3, 4)
        assert "must be that of the replica, 4 ranks (cfg 1 x tp 4)" in seen["mesh"]
        assert f"got 2 ranks and rank {rank}" in seen["rank"]
        assert seen["world"] == (2, True)
        assert "must come before this rank leaves" in seen["closed"]


@pytest.mark.slow
def test_each_service_ends_alone_and_a_foreign_group_never(tmp_path: Path) -> None:
    for seen in on_processes(f"{RANKS}:one_after_the_other", (1, 2), tmp_path):
        assert seen.pop("left") is False
        assert sorted(seen) == ["guest 0", "guest 1", "second", "theirs"]
        assert all(total.tolist() == [2.0, 2.0] for total in seen.values())


@pytest.mark.slow
def test_the_others_notice_a_rank_that_leaves(tmp_path: Path) -> None:
    lead, other = on_processes(f"{RANKS}:leave_early", (1, 2), tmp_path, timeout_s=3600.0)
    assert "every rank must arrive at tp collective 2 (all_gather)" in lead
    assert "every rank must arrive at control collective 2 (all_gather) within 0.5 s" in other


@pytest.mark.slow
def test_ranks_that_never_start_are_named(tmp_path: Path) -> None:
    code = (
        "from tests.core.parallel_ranks import alone\n"
        f"ranks, text = alone({str(tmp_path)!r})\n"
        "assert ranks == (1,), text\n"
        "assert 'all 2 ranks (cfg 1 x tp 2) must meet within 1 s; got no rank 1.' in text, text\n"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=root)


def test_a_start_that_is_interrupted_leaves_nothing_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    def interrupt() -> None:
        raise KeyboardInterrupt

    default = SimpleNamespace(leave=lambda: ended.append("default group"))
    watch = SimpleNamespace(begin=interrupt, close=lambda: ended.append("watch"))
    group = SimpleNamespace(close=lambda: ended.append("group"))

    def maker(mesh: Any, rank: int, device: Any, watch: Any, groups: list[Any]) -> Any:
        def make(axis: str, *_: Any, **__: Any) -> Any:
            groups.append(group)
            return group

        return SimpleNamespace(along=make, whole=make)

    monkeypatch.setattr(starting, "gather", lambda *_: 1)
    monkeypatch.setattr(starting, "_default_group", lambda *_: default)
    monkeypatch.setattr(starting, "Watch", lambda *_: watch)
    monkeypatch.setattr(starting, "_Maker", maker)
    nowhere: Any = object()
    with pytest.raises(KeyboardInterrupt):
        ParallelService.start(Mesh(tp=2), 0, torch.device("cpu"), store=nowhere)
    assert ended == ["watch", *["group"] * 4, "default group"]


def test_group_of_one_is_a_group() -> None:
    assert repr(Group("tp", (4, 5), 1)) == "Group('tp', rank 1 of 2)"
    assert ParallelService.single().is_lead
