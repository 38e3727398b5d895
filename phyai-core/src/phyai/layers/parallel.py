"""Linear layers and an embedding that the tensor-parallel ranks of a replica share.

Each rank holds and reads only its part. A pair of column and row layer needs one collective: the
columns between them stay where they are. With one rank all of them are the plain layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.errors import ConfigError
from phyai.kernels.quant import QuantizedActivations
from phyai.layers.linear import Linear
from phyai.layers.placement import Placement
from phyai.parallel import Group, HeadShards
from phyai.weights import ClaimKey, Loader, Region, claim, fused, sharded


class ColumnLinear(Linear):
    """A Linear whose outputs are split: this rank has an equal part of each leg.

    out_features: of the whole layer, per leg; ``sizes`` has those of this rank.
    Shapes: x [..., in], alike on all ranks -> [..., sum(out) / tp].
    Raises: ConfigError for a leg that does not divide by the ranks.

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> from phyai.parallel import Group
    >>> second = Group("tp", ranks=(0, 1), rank=1)
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32, tp=second)
    >>> ColumnLinear(["gate", "up"], 8, [32, 32], at, epilogue="silu_mul").sizes
    [16, 16]
    """

    def __init__(
        self,
        names: str | Sequence[str],
        in_features: int,
        out_features: int | Sequence[int],
        at: Placement,
        *,
        bias: bool = False,
        epilogue: str = "none",
        packed: bool = True,
    ) -> None:
        legs = [names] if isinstance(names, str) else list(names)
        whole = [out_features] if isinstance(out_features, int) else list(out_features)
        local = [_share(size, at.tp, legs[0], "outputs") for size in whole]
        loader = _columns(local, at.tp, [1] * len(local))
        super().__init__(
            legs,
            in_features,
            local,
            at,
            bias=bias,
            epilogue=epilogue,
            packed=packed,
            loader=loader,
            bias_loader=loader,
        )


class QKVLinear(Linear):
    """Query, key and value projections of this rank's heads.

    names: of the legs.  legs: which of them there are: ``qkv``, ``q`` or ``kv``.
    Key and value heads are split as ``shards`` says, and kept by several ranks where there are
    fewer heads than ranks. ``sizes`` has the widths of this rank.
    Shapes: x [..., in], alike on all ranks -> [..., sum(sizes)].

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> from phyai.parallel import Group, HeadShards
    >>> at = Placement(
    ...     KernelTable(), torch.device("cpu"), torch.float32, tp=Group("tp", (0, 1), rank=1)
    ... )
    >>> QKVLinear(["q", "k", "v"], 8, HeadShards.of(4, 1, at.tp.size, at.tp.rank), 16, at).sizes
    [32, 16, 16]
    """

    def __init__(
        self,
        names: str | Sequence[str],
        in_features: int,
        shards: HeadShards,
        head_dim: int,
        at: Placement,
        *,
        bias: bool = False,
        legs: str = "qkv",
        packed: bool = True,
    ) -> None:
        q, kv = shards.heads * head_dim, shards.kv_heads * head_dim
        local = [q if leg == "q" else kv for leg in legs]
        copies = [1 if leg == "q" else shards.kv_replicas for leg in legs]
        loader = _columns(local, at.tp, copies)
        super().__init__(
            [names] if isinstance(names, str) else names,
            in_features,
            local,
            at,
            bias=bias,
            packed=packed,
            loader=loader,
            bias_loader=loader,
        )


class RowLinear(Linear):
    """A Linear whose inputs are split; the ranks' parts are summed, the bias added once after it.

    in_features: of the whole layer.
    Shapes: x [..., in / tp], this rank's part -> [..., out], alike on all ranks.
    Rounding: each part in the weight's dtype, their sum as in ``Group.all_reduce``.
    Raises: ConfigError when ``in_features`` does not divide by the ranks.

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> RowLinear("down", 32, 8, at)(torch.zeros(2, 32)).shape
    torch.Size([2, 8])
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        at: Placement,
        *,
        bias: bool = False,
        packed: bool = True,
    ) -> None:
        tp = at.tp
        alone = tp.size == 1
        super().__init__(
            name,
            _share(in_features, tp, name, "inputs"),
            out_features,
            at,
            bias=bias and alone,
            packed=packed,
            loader=None if alone else sharded(1, tp.rank, tp.size),
        )
        self._group = tp
        if bias and not alone:
            self.bias = claim(at.parameter(out_features), f"{name}.bias")

    def forward(self, x: Tensor | QuantizedActivations) -> Tensor:
        if self._group.size == 1:
            return super().forward(x)
        out = self._group.all_reduce(self._product(x, None))
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class VocabRows(Loader):
    """Rows ``start`` to ``start + rows`` of a table of ``vocab`` rows.

    in_file: leave them in the memory-mapped file where device and dtype are the same.

    >>> import torch
    >>> VocabRows(vocab=100, start=50).region(torch.empty(50, 8), None)
    Region(dim=0, start=50, length=50)
    """

    vocab: int
    start: int
    in_file: bool = False

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (self.vocab, *param.shape[1:])

    def region(self, param: Tensor, shard_id: int | None) -> Region | None:
        whole = param.shape[0] == self.vocab
        return None if whole else Region(0, self.start, param.shape[0])

    def keeps(self, param: Tensor, tensor: Tensor) -> bool:
        same = (param.device, param.dtype) == (tensor.device, tensor.dtype)
        return self.in_file and same


class VocabParallelEmbedding(nn.Module):
    """A token embedding of which each rank holds neighbouring rows; their sum is the result.

    names: checkpoint tensors of the table [vocab, width], the first one present is taken; or one.
    in_file: this rank's rows stay in the checkpoint's file, where device and dtype fit.
    The rows need not divide by the ranks: the last rank may have fewer.
    Shapes: ids int64 [...] in [0, vocab) -> [..., width], exact: all but one rank add zero. With
    one rank an id outside is an IndexError; with several its row is zero, so check ids in ``plan``
    or ``prepare``.

    >>> import torch
    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> VocabParallelEmbedding("embed.weight", 100, 8, at)(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 8])
    """

    def __init__(
        self, names: ClaimKey, vocab: int, width: int, at: Placement, *, in_file: bool = False
    ) -> None:
        super().__init__()
        self._group = at.tp
        rows = -(-vocab // at.tp.size)
        self.start = min(at.tp.rank * rows, vocab)
        held = min(rows, vocab - self.start)
        if held < 1:
            raise ConfigError(
                f"an embedding of {vocab} rows must have some for each of {at.tp.size} ranks; "
                f"got none for rank {at.tp.rank}. Use a smaller tp_size."
            )
        self.weight = claim(
            at.parameter(held, width), names, loader=VocabRows(vocab, self.start, in_file)
        )

    def forward(self, ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return functional.embedding(ids, self.weight)
        local = ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = functional.embedding(torch.where(mine, local, 0), self.weight)
        return self._group.all_reduce(torch.where(mine[..., None], rows, 0))


def _share(size: int, tp: Group, name: str, what: str) -> int:
    if size % tp.size:
        raise ConfigError(
            f"layer {name} must have {what} that divide by tp_size; got {size} and {tp.size}. "
            "Use a tp_size that divides them."
        )
    return size // tp.size


def _columns(local: Sequence[int], tp: Group, copies: Sequence[int]) -> Loader | None:
    """The loader of stacked rows of which each rank reads its part; None = all of them."""
    if tp.size == 1:
        return None
    return fused(local, rank=tp.rank, world=tp.size, replicate=copies)
