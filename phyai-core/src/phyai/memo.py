"""Results kept across requests: tensors by what they were computed from, byte-bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from phyai.cuda_graph import capturing
from phyai.errors import ConfigError, CudaGraphError

DEFAULT_BYTES = 256 * 2**20


class Memo:
    """Tensors of one replica by key, least recently used first out. Thread-safe.

    For what depends on a request's content and the weights alone: K/V of a prompt, the
    unconditional branch. A key names all of that content but not the weights: ``clear`` empties
    the memo at every weight update. The tensors stay on their device. Ranks that share layers agree
    on what is in it when ``plan`` and ``encode`` alone use it: ``prepare`` runs on one of them.

    max_bytes: 0 = keep nothing.

    >>> import torch
    >>> from phyai.memo import Memo
    >>> memo = Memo(max_bytes=1024)
    >>> _ = memo.put(("prompt", (3, 1)), {"k": torch.ones(4)})
    >>> memo.get(("prompt", (3, 1))), memo.get("other")
    ({'k': tensor([1., 1., 1., 1.])}, None)
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise ConfigError(
                f"memo size must be at least 0 bytes; got {max_bytes!r}. Use 0 to keep nothing."
            )
        self.max_bytes = max_bytes
        self.version = 0
        """How often it was emptied: which weights its entries belong to."""
        self._entries: OrderedDict[Hashable, tuple[dict[str, Tensor], int]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._hits = self._misses = 0

    def get(self, key: Hashable) -> dict[str, Tensor] | None:
        """Return the tensors kept under a key, None when there are none.

        They are the memo's own: copy them into the cache, change nothing.
        Raises: CudaGraphError inside a captured region, which would replay one answer for ever.
        """
        _refuse_capture()
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return dict(found[0])

    def put(
        self, key: Hashable, tensors: Mapping[str, Tensor], *, version: int | None = None
    ) -> bool:
        """Keep copies of the tensors; return whether they were kept.

        Not kept: what is larger than the memo, and what was computed before the last ``clear``.
        version: ``version`` as it was when the computation began. It is needed where weights may
            be updated meanwhile: in ``prepare``, not in ``plan`` and ``encode``.
        Raises: CudaGraphError inside a captured region.
        """
        _refuse_capture()
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self.max_bytes or self.max_bytes == 0:
            return False
        with torch.no_grad():
            copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        with self._lock:
            if version is not None and version != self.version:
                return False
            _, before = self._entries.pop(key, ({}, 0))
            self._bytes += size - before
            self._entries[key] = copies, size
            while self._bytes > self.max_bytes:
                self._bytes -= self._entries.popitem(last=False)[1][1]
        return True

    def clear(self) -> None:
        """Forget everything; what is being computed with the old weights must not come in."""
        with self._lock:
            self._entries.clear()
            self._bytes = 0
            self.version += 1

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def stats(self) -> dict[str, Any]:
        """Return hits, misses, entries, bytes and max_bytes."""
        with self._lock:
            return {
                "hits": self._hits,
                "misses": self._misses,
                "entries": len(self._entries),
                "bytes": self._bytes,
                "max_bytes": self.max_bytes,
            }


def _refuse_capture() -> None:
    if capturing():
        raise CudaGraphError(
            "memo must be used outside captured regions; got a call while a graph records. Use it "
            "in plan(), or give the conditioning capture_safe = False."
        )
