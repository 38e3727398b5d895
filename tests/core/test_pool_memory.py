"""What replicas cost: one copy of packed weights for all of them, in summed PSS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.pool_adapter import ask, installed, number
from tests.core.test_pool import pids, pool

pytestmark = pytest.mark.slow

MODEL_MB = 200


@pytest.fixture(scope="module")
def args(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with installed(tmp_path_factory.mktemp("antics")) as cls:
        yield cls


def pss_mb(pid: int) -> float:
    """Return its part of memory that is no file's: who else has loaded torch changes nothing."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="utf-8") as file:
        rows = dict(line.split(":", 1) for line in list(file)[1:])
    return sum(int(rows[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) / 1024


def summed(args: Any, replicas: int) -> float:
    """Return the PSS of all processes of a pool whose replicas have all used every weight."""
    with pool(args, replicas) as engine:
        futures = [engine.submit(ask("read")) for _ in range(3 * replicas)]
        assert {number(future.result(timeout=120)) for future in futures} == {1024.0}
        split = {pid: pss_mb(pid) for pid in sorted(pids(engine))}
        shown = ", ".join(f"{mb:.0f}" for mb in split.values())
        print(f"{replicas} replicas: {sum(split.values()):.0f} MB in processes of {shown}")
        return sum(split.values())


def test_replicas_cost_one_copy_of_packed_weights(args: Any) -> None:
    if not os.path.exists("/proc/self/smaps_rollup"):
        pytest.fail("this test reads /proc/PID/smaps_rollup")
    loaded = args(weight_mb=MODEL_MB)
    one, two, four = (summed(loaded, count) for count in (1, 2, 4))
    assert one > MODEL_MB
    assert max(two, four) <= 1.2 * one, (one, two, four)
