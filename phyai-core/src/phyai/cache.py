"""Static buffers of one (key, batch bucket, branch): inputs and what encode made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phyai.errors import PluginContractError
from phyai.types import BufferSpec, Key, Prepared


class Allocator(Protocol):
    """What a Cache needs of the memory service."""

    def allocate_all(
        self, specs: Mapping[str, tuple[Sequence[int], torch.dtype]], zero: bool = True
    ) -> dict[str, Tensor]:
        """Return a buffer per name, or allocate none and raise CapacityError."""
        ...

    def release(self, prefix: str) -> int: ...


@dataclass
class CacheInputs:
    """Static copies of ``Prepared.tensors``, padded to the batch bucket.

    >>> import torch
    >>> from phyai.cache import CacheInputs
    >>> inputs = CacheInputs({"state": torch.zeros(1, 8)})
    >>> "state" in inputs, inputs.get("known.action.mask")
    (True, None)
    """

    tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Tensor | None:
        return self.tensors.get(name)


class Cache:
    """Buffers by name; never grows, never subclassed.

    Shapes: every buffer declared with ``rows=True`` is [capacity, *spec.shape].
    ``rows`` is how many of them the current batch uses, ``plan`` what the adapter's conditioning
    computed on the host for this batch (index lists, lengths). Read-only inside the solver loop,
    except for scratch buffers and taps. ``session_buffers``: those with ``session=True``; core puts
    the rows of the sessions there before plan() and keeps what is there after a valid result.

    >>> import torch
    >>> from phyai.memory import Arena
    >>> from phyai.types import BufferSpec, Key, Prepared
    >>> spec = {"features": BufferSpec((4,), torch.float32)}
    >>> cache = Cache("cache1", Key(), 2, spec, Arena("cpu"), torch.device("cpu"))
    >>> cache.load(Prepared({"state": torch.ones(1, 3)}, 1, Key()))
    >>> cache["features"].shape, cache.inputs["state"].shape, cache.rows_valid.tolist()
    (torch.Size([2, 4]), torch.Size([2, 3]), [True, False])
    """

    def __init__(
        self,
        name: str,
        key: Key,
        capacity: int,
        spec: Mapping[str, BufferSpec],
        memory: Allocator,
        device: torch.device,
        branch: str = "cond",
    ) -> None:
        self.name, self.key, self.capacity, self.branch = name, key, capacity, branch
        self.device = device
        self.rows = 0
        self.plan: Any = None
        self.inputs = CacheInputs({})
        self._memory = memory
        self._spec = dict(spec)
        shapes: dict[str, tuple[Sequence[int], torch.dtype]] = {
            buffer: ((capacity, *wanted.shape) if wanted.rows else wanted.shape, wanted.dtype)
            for buffer, wanted in self._spec.items()
        }
        self._buffers = self._allocate({**shapes, ".rows_valid": ((capacity,), torch.bool)})
        self.rows_valid = self._buffers.pop(".rows_valid")
        self.session_buffers: Mapping[str, Tensor] = {
            buffer: self._buffers[buffer] for buffer, wanted in self._spec.items() if wanted.session
        }

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._buffers[name]
        except KeyError:
            raise PluginContractError(
                f"cache buffer must be declared in the CacheSpec; got {name!r}. "
                f"Declared: {', '.join(sorted(self._buffers)) or 'none'}."
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._buffers

    @property
    def nbytes(self) -> int:
        tensors = [*self._buffers.values(), *self.inputs.tensors.values()]
        return sum(t.nbytes for t in tensors)

    def load(self, batch: Prepared) -> None:
        """Copy a prepared batch into the static inputs; rows past the batch repeat row 0."""
        if batch.rows > self.capacity:
            raise PluginContractError(
                f"batch must fit the cache's {self.capacity} rows; got {batch.rows}."
            )
        if not self.inputs.tensors:
            self._allocate_inputs(batch)
        if batch.tensors.keys() != self.inputs.tensors.keys():
            raise PluginContractError(
                "requests with equal keys must hold the same tensors; got "
                f"{sorted(batch.tensors)} after {sorted(self.inputs.tensors)}."
            )
        for name, source in batch.tensors.items():
            target = self.inputs.tensors[name]
            if source.shape[1:] != target.shape[1:] or source.shape[0] != batch.rows:
                raise PluginContractError(
                    f"tensor {name!r} must have shape {[batch.rows, *target.shape[1:]]} for this "
                    f"key; got {list(source.shape)}."
                )
            target[: batch.rows].copy_(source)
            if batch.rows < self.capacity:
                target[batch.rows :] = target[:1]
        self.rows = batch.rows
        self.rows_valid[: batch.rows] = True
        self.rows_valid[batch.rows :] = False
        self.reset()

    def reset(self) -> None:
        """Clear the buffers declared with ``zero=True``."""
        for name, wanted in self._spec.items():
            if wanted.zero:
                self._buffers[name].zero_()

    def close(self) -> None:
        self._buffers.clear()
        self.session_buffers = {}
        self.inputs.tensors.clear()
        self._memory.release(f"{self.name}/")

    def _allocate_inputs(self, batch: Prepared) -> None:
        fresh = self._allocate(
            {
                f"in.{name}": ((self.capacity, *tensor.shape[1:]), tensor.dtype)
                for name, tensor in batch.tensors.items()
            }
        )
        self.inputs.tensors.update((n.removeprefix("in."), t) for n, t in fresh.items())

    def _allocate(
        self, shapes: Mapping[str, tuple[Sequence[int], torch.dtype]]
    ) -> dict[str, Tensor]:
        fresh = self._memory.allocate_all({f"{self.name}/{n}": s for n, s in shapes.items()})
        return {name.removeprefix(f"{self.name}/"): tensor for name, tensor in fresh.items()}
