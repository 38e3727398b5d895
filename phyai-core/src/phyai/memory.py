"""Static device memory: an arena of named buffers with a budget, and paged key/value pools."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.cuda_graph import capturing
from phyai.errors import CapacityError, ConfigError, CudaGraphError, StaticCacheError

LOWER = "max_batch_size, the number of live caches or the token bucket, or raise the memory budget"


@dataclass(frozen=True, slots=True)
class BufferRow:
    """One line of the memory report."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Arena:
    """Named static buffers of one device; the budget is checked before anything is allocated.

    budget_bytes: None = no limit.

    >>> import torch
    >>> from phyai.memory import Arena
    >>> arena = Arena("cpu", budget_bytes=1024)
    >>> keys = arena.allocate("cache1/k", (4, 8), torch.float32)
    >>> arena.nbytes, arena.release("cache1/")
    (128, 128)
    """

    def __init__(self, device: str | torch.device, budget_bytes: int | None = None) -> None:
        self.device = torch.device(device)
        self.budget_bytes = budget_bytes
        self._buffers: dict[str, Tensor] = {}
        self._nbytes = 0
        self._peak_nbytes = 0
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def peak_nbytes(self) -> int:
        return self._peak_nbytes

    def allocate(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, zero: bool = True
    ) -> Tensor:
        """Return a new buffer.

        zero=False leaves the memory as it was, which may include NaN.
        Raises: CapacityError over the budget or when the device is full; ConfigError when the
            name is taken.
        """
        return self.allocate_all({name: (shape, dtype)}, zero)[name]

    def allocate_all(
        self, specs: Mapping[str, tuple[Sequence[int], torch.dtype]], zero: bool = True
    ) -> dict[str, Tensor]:
        """Return a buffer per name, or allocate none: the total is checked first.

        Raises: as ``allocate``; CudaGraphError while a graph records: a buffer made there would
            belong to the graph's pool, whose memory other graphs use too.
        """
        if capturing():
            raise CudaGraphError(
                f"buffers must be allocated before a graph records; got {_names(specs)} during a "
                "capture. Declare them in the CacheSpec or allocate them in load()."
            )
        with self._lock:
            for name in specs:
                if name in self._buffers:
                    raise ConfigError(
                        f"buffer name must be new; got {name!r} again. Release it first."
                    )
            needed = sum(_size(shape, dtype) for shape, dtype in specs.values())
            self._check_budget(specs, needed)
            fill = torch.zeros if zero else torch.empty
            try:
                fresh = {
                    name: fill(tuple(shape), dtype=dtype, device=self.device)
                    for name, (shape, dtype) in specs.items()
                }
            except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                raise CapacityError(
                    f"buffers {_names(specs)} need {needed:,} bytes that {self.device} does not "
                    f"have; {self._nbytes:,} bytes are in use here. Lower {LOWER}."
                ) from error
            self._buffers.update(fresh)
            self._nbytes += needed
            self._peak_nbytes = max(self._peak_nbytes, self._nbytes)
            return fresh

    def release(self, prefix: str) -> int:
        """Forget the buffers called ``prefix`` or below it; return their bytes.

        "cache1" and "cache1/" mean cache1/k but not cache10/k; "" means all. The memory is free
        once the holders of the tensors let go.
        """
        with self._lock:
            gone = [name for name in self._buffers if _below(name, prefix)]
            freed = sum(self._buffers.pop(name).nbytes for name in gone)
            self._nbytes -= freed
            return freed

    def get(self, name: str) -> Tensor | None:
        return self._buffers.get(name)

    def buffers(self) -> dict[str, Tensor]:
        """Return every buffer by name."""
        with self._lock:
            return dict(self._buffers)

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    def report(self) -> list[BufferRow]:
        """Return one row per buffer, largest first."""
        with self._lock:
            rows = [
                BufferRow(name, tuple(t.shape), t.dtype, t.nbytes)
                for name, t in self._buffers.items()
            ]
        return sorted(rows, key=lambda row: (-row.nbytes, row.name))

    def _check_budget(
        self, specs: Mapping[str, tuple[Sequence[int], torch.dtype]], needed: int
    ) -> None:
        if self.budget_bytes is None or self._nbytes + needed <= self.budget_bytes:
            return
        raise CapacityError(
            f"buffers {_names(specs)} must fit the memory budget of {self.budget_bytes:,} bytes; "
            f"got {needed:,} bytes needed with {self._nbytes:,} bytes in use. Lower {LOWER}."
        )


class KVCachePool:
    """Key and value slots of every layer, allocated once.

    Per layer, K and V are [num_slots, page_size, num_kv_heads, head_dim]. A slot index counts
    tokens: page * page_size + offset. Slot 0 takes the writes of padding rows; nobody reads it.

    >>> import torch
    >>> from phyai.memory import KVCachePool
    >>> pool = KVCachePool(2, 16, 1, 8, torch.float32, "cpu")
    >>> keys, values = pool.kv_buffer(0)
    >>> keys.shape
    torch.Size([16, 1, 1, 8])
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device,
        page_size: int = 1,
    ) -> None:
        sizes = (num_layers, num_slots, num_kv_heads, head_dim, page_size)
        if min(sizes) < 1:
            raise ConfigError(
                f"key/value pool sizes must be at least 1; got {sizes}. Correct them."
            )
        self.num_layers, self.num_slots, self.page_size = num_layers, num_slots, page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        shape = (2, num_layers, num_slots, page_size, num_kv_heads, head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=self.device)

    @property
    def total_bytes(self) -> int:
        return self._kv.nbytes

    def kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return K and V of a layer, [num_slots, page_size, num_kv_heads, head_dim], as views."""
        self._check_layer(layer)
        return self._kv[0, layer], self._kv[1, layer]

    def write_kv(self, layer: int, slot_indices: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [M, num_kv_heads, head_dim] to the slots int64 [M], in place.

        Raises: ConfigError for another dtype or shape.
        """
        self._check_slots(slot_indices)
        want = (slot_indices.shape[0], self.num_kv_heads, self.head_dim)
        for name, value in (("k", k), ("v", v)):
            if tuple(value.shape) != want or value.dtype != self.dtype:
                raise ConfigError(
                    f"{name} must be {list(want)} {self.dtype}; got {list(value.shape)} "
                    f"{value.dtype}. Cast or slice it first."
                )
        for buffer, value in zip(self.kv_buffer(layer), (k, v), strict=True):
            buffer.view(-1, self.num_kv_heads, self.head_dim).index_copy_(0, slot_indices, value)

    def gather_kv(self, layer: int, slot_indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of K and V at the slots int64 [M], each [M, num_kv_heads, head_dim]."""
        self._check_slots(slot_indices)
        k, v = (
            buffer.view(-1, self.num_kv_heads, self.head_dim).index_select(0, slot_indices)
            for buffer in self.kv_buffer(layer)
        )
        return k, v

    def zero_(self) -> None:
        self._kv.zero_()

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ConfigError(
                f"layer must be in 0..{self.num_layers - 1}; got {layer!r}. Correct the index."
            )

    def _check_slots(self, slot_indices: Tensor) -> None:
        if slot_indices.dtype != torch.int64 or slot_indices.dim() != 1:
            raise ConfigError(
                f"slot_indices must be one-dimensional int64; got {list(slot_indices.shape)} "
                f"{slot_indices.dtype}. Convert them first."
            )


class StaticCache:
    """A bump allocator over the slots [base_offset, base_offset + capacity) of a pool.

    >>> import torch
    >>> from phyai.memory import KVCachePool, StaticCache
    >>> pool = KVCachePool(2, 16, 1, 8, torch.float32, "cpu")
    >>> cache = StaticCache(pool, base_offset=1, capacity=15)
    >>> slots = cache.allocate(3)
    >>> pool.write_kv(0, slots, torch.ones(3, 1, 8), torch.zeros(3, 1, 8))
    >>> slots.tolist(), cache.used
    ([1, 2, 3], 3)
    """

    def __init__(self, pool: KVCachePool, base_offset: int, capacity: int) -> None:
        slots = pool.num_slots * pool.page_size
        if base_offset < 1 or capacity < 1 or base_offset + capacity > slots:
            raise ConfigError(
                f"static cache must lie in slots 1..{slots - 1}; got base_offset {base_offset!r} "
                f"and capacity {capacity!r}. Slot 0 is kept for padding; enlarge the pool."
            )
        self.pool, self.base_offset, self.capacity = pool, base_offset, capacity
        self.used = 0

    def allocate(self, n: int) -> Tensor:
        """Return the next n slot indices, int64 [n] on the pool's device.

        Raises: StaticCacheError when fewer than n slots are left.
        """
        if not 0 <= n <= self.capacity - self.used:
            raise StaticCacheError(
                f"static cache must have room for {n} slots; got {self.capacity - self.used} of "
                f"{self.capacity} left. Call reset() or enlarge its capacity."
            )
        first = self.base_offset + self.used
        self.used += n
        return torch.arange(first, first + n, dtype=torch.int64, device=self.pool.device)

    def reset(self) -> None:
        """Give all slots back; their content stays until it is overwritten."""
        self.used = 0


def _size(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _names(specs: Mapping[str, object]) -> str:
    names = list(specs)
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _below(name: str, prefix: str) -> bool:
    if not name.startswith(prefix):
        return False
    return prefix in ("", name) or prefix[-1] in "/." or name[len(prefix)] in "/."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator raised ``error``; torch has no type of its own for the CPU's."""
    typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return typed or "not enough memory" in str(error) or "can't allocate" in str(error)
