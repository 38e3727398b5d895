"""Arena, KVCachePool and StaticCache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from phyai.errors import CapacityError, ConfigError, StaticCacheError
from phyai.memory import Arena, KVCachePool, StaticCache

F32 = torch.float32


def test_buffers_are_zeroed_counted_and_reported() -> None:
    arena = Arena("cpu")
    small = arena.allocate("c1/mask", (3,), torch.bool)
    big = arena.allocate("c1/k", (2, 5), torch.bfloat16)
    assert not small.any()
    assert not big.any()
    assert arena.nbytes == 3 + 20
    assert arena.get("c1/k") is big
    assert arena.get("c1/v") is None
    rows = [(row.name, row.shape, row.dtype, row.nbytes) for row in arena.report()]
    assert rows == [
        ("c1/k", (2, 5), torch.bfloat16, 20),
        ("c1/mask", (3,), torch.bool, 3),
    ]


def test_names_are_taken_once() -> None:
    arena = Arena("cpu")
    arena.allocate("x", (1,), F32)
    with pytest.raises(ConfigError, match="must be new; got 'x'"):
        arena.allocate("x", (1,), F32)
    arena.release("x")
    arena.allocate("x", (1,), F32)


def test_budget_is_checked_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena("cpu", budget_bytes=100)
    arena.allocate("a", (10,), F32)

    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(torch, "zeros", never)
    with pytest.raises(
        CapacityError, match=r"'b'.*budget of 100 bytes; got 64 bytes needed with 40"
    ):
        arena.allocate("b", (16,), F32)
    with pytest.raises(CapacityError, match="Lower max_batch_size"):
        arena.allocate_all({"b": ((8,), F32), "c": ((8,), F32)})
    assert arena.nbytes == 40
    assert "b" not in arena


def test_budget_may_be_filled_exactly() -> None:
    arena = Arena("cpu", budget_bytes=64)
    made = arena.allocate_all({"a": ((8,), F32), "b": ((4, 2), F32)})
    assert [tuple(t.shape) for t in made.values()] == [(8,), (4, 2)]
    assert arena.nbytes == arena.peak_nbytes == 64


def test_a_full_device_is_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("out")

    arena = Arena("cpu")
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(CapacityError, match="cpu does not have"):
        arena.allocate("a", (1,), F32)
    assert arena.nbytes == 0


def test_huge_allocation_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError):
        Arena("cpu").allocate("a", (1 << 46,), torch.int8, zero=False)


@pytest.mark.parametrize(
    ("prefix", "gone"),
    [
        ("c1", {"c1", "c1/k", "c1/x.a", "c1.y"}),
        ("c1/", {"c1/k", "c1/x.a"}),
        ("c1/x", {"c1/x.a"}),
        ("", {"c1", "c1/k", "c1/x.a", "c1.y", "c10/k"}),
        ("other", set()),
    ],
)
def test_release_by_prefix(prefix: str, gone: set[str]) -> None:
    arena = Arena("cpu", budget_bytes=20)
    names = {"c1", "c1/k", "c1/x.a", "c1.y", "c10/k"}
    for name in names:
        arena.allocate(name, (1,), F32)
    assert arena.release(prefix) == 4 * len(gone)
    assert {row.name for row in arena.report()} == names - gone
    assert arena.nbytes == 4 * (5 - len(gone))


def test_threads_never_exceed_the_budget() -> None:
    arena = Arena("cpu", budget_bytes=4 * 50)

    def take(index: int) -> bool:
        try:
            arena.allocate(f"b{index}", (1,), F32)
        except CapacityError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(200))) == 50
    assert arena.nbytes == 200


# ---------------------------------------------------------------- key/value slots


def pool(slots: int = 8, page: int = 1) -> KVCachePool:
    return KVCachePool(2, slots, 3, 4, F32, "cpu", page_size=page)


@pytest.mark.parametrize("page", [1, 2])
def test_write_then_gather(page: int) -> None:
    kv = pool(page=page)
    assert kv.total_bytes == 2 * 2 * 8 * page * 3 * 4 * 4
    slots = torch.tensor([5, 1])
    k, v = torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0)
    kv.write_kv(1, slots, k, v)
    got_k, got_v = kv.gather_kv(1, slots)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    whole_k, whole_v = kv.kv_buffer(1)
    assert whole_k.shape == whole_v.shape == (8, page, 3, 4)
    assert whole_k.sum() == 24
    assert whole_k[5 // page, 5 % page].sum() == 12
    assert not kv.kv_buffer(0)[0].any()
    kv.zero_()
    assert not whole_v.any()


def test_pool_addresses_are_stable() -> None:
    kv = pool()
    before = [t.data_ptr() for t in kv.kv_buffer(0)]
    kv.write_kv(0, torch.tensor([1]), torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    kv.zero_()
    assert [t.data_ptr() for t in kv.kv_buffer(0)] == before


def test_pool_refuses_misuse() -> None:
    kv = pool()
    one, slots = torch.ones(1, 3, 4), torch.tensor([1])
    with pytest.raises(ConfigError, match=r"k must be \[1, 3, 4\]"):
        kv.write_kv(0, slots, one[:, :2], one)
    with pytest.raises(ConfigError, match="v must be"):
        kv.write_kv(0, slots, one, one.double())
    with pytest.raises(ConfigError, match="int64"):
        kv.write_kv(0, slots.int(), one, one)
    with pytest.raises(ConfigError, match="one-dimensional"):
        kv.gather_kv(0, slots[None])
    with pytest.raises(ConfigError, match=r"layer must be in 0\.\.1; got 2"):
        kv.kv_buffer(2)
    with pytest.raises(ConfigError, match="at least 1"):
        KVCachePool(1, 0, 1, 1, F32, "cpu")


def test_static_cache_bumps_and_resets() -> None:
    cache = StaticCache(pool(), base_offset=1, capacity=5)
    assert cache.allocate(2).tolist() == [1, 2]
    assert cache.allocate(3).tolist() == [3, 4, 5]
    assert cache.allocate(0).tolist() == []
    with pytest.raises(StaticCacheError, match="room for 1 slots; got 0 of 5"):
        cache.allocate(1)
    cache.reset()
    slots = cache.allocate(5)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [1, 2, 3, 4, 5]


def test_a_refused_allocation_takes_nothing() -> None:
    cache = StaticCache(pool(), 1, 4)
    with pytest.raises(StaticCacheError):
        cache.allocate(5)
    assert cache.allocate(4).numel() == 4


@pytest.mark.parametrize(("base", "capacity"), [(0, 2), (1, 0), (1, 8), (8, 1)])
def test_static_cache_stays_clear_of_slot_zero_and_of_the_end(base: int, capacity: int) -> None:
    with pytest.raises(ConfigError, match="Slot 0 is kept for padding"):
        StaticCache(pool(), base, capacity)
