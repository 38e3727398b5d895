"""Cache: declared buffers, static inputs padded with row 0, all-or-nothing allocation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phyai.cache import Cache
from phyai.errors import CapacityError, PluginContractError
from phyai.memory import Arena
from phyai.types import BufferSpec, Key, Prepared

F32 = torch.float32
SPEC = {
    "k": BufferSpec((2, 3), F32),
    "state": BufferSpec((4,), F32, zero=True),
    "table": BufferSpec((5,), torch.int64, rows=False),
}


def make(capacity: int = 4, budget: int | None = None, spec: Any = None) -> tuple[Cache, Arena]:
    arena = Arena("cpu", budget)
    cache = Cache("c1", Key(), capacity, spec or SPEC, arena, torch.device("cpu"))
    return cache, arena


def batch(rows: int, fill: float = 1.0, **more: Any) -> Prepared:
    x = torch.arange(rows, dtype=F32)[:, None].repeat(1, 3) + fill
    return Prepared({"x": x, "n": torch.arange(rows), **more}, rows, Key())


def test_buffers_have_their_declared_shape_and_start_at_zero() -> None:
    cache, arena = make()
    assert cache["k"].shape == (4, 2, 3)
    assert cache["table"].shape == (5,)
    assert cache["table"].dtype == torch.int64
    assert not cache["k"].any()
    assert "k" in cache
    assert "nothing" not in cache
    assert arena.nbytes == 4 * 6 * 4 + 4 * 4 * 4 + 5 * 8 + 4
    cache.load(batch(2))
    assert cache.nbytes + 4 == arena.nbytes  # rows_valid


def test_an_undeclared_buffer_names_the_declared_ones() -> None:
    cache, _ = make()
    with pytest.raises(PluginContractError, match=r"got 'kk'\. Declared: k, state, table"):
        cache["kk"]


def test_rows_past_the_batch_repeat_row_0() -> None:
    cache, _ = make()
    cache.load(batch(4))
    cache.load(batch(2, fill=10.0))
    assert cache.rows == 2
    assert cache.inputs["x"][:, 0].tolist() == [10.0, 11.0, 10.0, 10.0]
    assert cache.inputs["n"].tolist() == [0, 1, 0, 0]
    assert cache.rows_valid.tolist() == [True, True, False, False]
    cache.load(batch(4))
    assert cache.rows_valid.all()


def test_loading_copies_into_the_same_addresses() -> None:
    cache, _ = make()
    source = batch(2)
    cache.load(source)
    before = {n: t.data_ptr() for n, t in cache.inputs.tensors.items()}
    assert before["x"] != source.tensors["x"].data_ptr()
    cache.load(batch(3, fill=5.0))
    assert before == {n: t.data_ptr() for n, t in cache.inputs.tensors.items()}
    assert source.tensors["x"][0, 0] == 1.0
    assert cache.inputs.get("nothing") is None
    assert "x" in cache.inputs


def test_only_zero_buffers_are_cleared_by_a_load() -> None:
    cache, _ = make()
    for name in SPEC:
        cache[name].fill_(3)
    cache.load(batch(1))
    assert not cache["state"].any()
    assert (cache["k"] == 3).all()
    assert (cache["table"] == 3).all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (batch(5), "fit the cache's 4 rows; got 5"),
        (batch(2, extra=torch.zeros(2)), "equal keys must hold the same tensors"),
        (Prepared({"x": torch.zeros(2, 3)}, 2, Key()), "the same tensors"),
        (
            Prepared({"x": torch.zeros(2, 4), "n": torch.zeros(2)}, 2, Key()),
            r"'x' must have shape \[2, 3\]",
        ),
        (Prepared({"x": torch.zeros(1, 3), "n": torch.zeros(2)}, 2, Key()), r"got \[1, 3\]"),
    ],
)
def test_a_batch_that_does_not_fit_its_key_is_a_contract_error(wrong: Any, words: str) -> None:
    cache, _ = make()
    cache.load(batch(2))
    with pytest.raises(PluginContractError, match=words):
        cache.load(wrong)


def test_a_cache_over_the_budget_allocates_nothing_at_all() -> None:
    arena = Arena("cpu", 200)
    with pytest.raises(CapacityError, match="budget of 200 bytes"):
        Cache("c1", Key(), 4, SPEC, arena, torch.device("cpu"))
    assert (arena.nbytes, arena.peak_nbytes, arena.report()) == (0, 0, [])
    Cache("c1", Key(), 1, SPEC, arena, torch.device("cpu"))  # the name is free


def test_inputs_over_the_budget_allocate_nothing() -> None:
    cache, arena = make(budget=220)
    held = arena.nbytes
    with pytest.raises(CapacityError):
        cache.load(batch(2))
    assert arena.nbytes == held
    assert cache.inputs.tensors == {}


def test_close_gives_everything_back() -> None:
    cache, arena = make()
    cache.load(batch(2))
    cache.close()
    assert arena.nbytes == 0
    assert "k" not in cache


def test_a_buffer_may_have_the_name_of_something_of_the_cache() -> None:
    cache, _ = make(spec={"rows_valid": BufferSpec((), F32), "in.x": BufferSpec((), F32)})
    assert cache["rows_valid"].dtype == F32
    assert cache.rows_valid.dtype == torch.bool
