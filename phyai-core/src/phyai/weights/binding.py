"""Which checkpoint tensors fill which parameter, and how: claims and loaders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from phyai.errors import PluginContractError
from phyai.weights.tensor_source import Region

ClaimKey: TypeAlias = "str | tuple[str, ...]"
"""A checkpoint name, or names of which the first one present is taken."""


class DuplicateClaimError(PluginContractError, RuntimeError):
    """Two parameters claim one checkpoint tensor."""


@dataclass(frozen=True)
class Loader:
    """Copies one checkpoint tensor into a parameter; subclass it for another layout.

    shard_id: which of several claimed keys the tensor belongs to; None for a single key.

    >>> import torch
    >>> from phyai.weights import fused
    >>> fused((4, 2)).shape(torch.empty(6, 3), 1)
    (2, 3)
    """

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        """Return the shape the whole tensor must have in the checkpoint."""
        return tuple(param.shape)

    def region(self, param: Tensor, shard_id: int | None) -> Region | None:
        """Return the part of it this process reads; None = all."""
        return None

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        """Write ``tensor`` (already cut to ``region``) into ``param``, casting to its dtype."""
        param.copy_(tensor)

    def keeps(self, param: Tensor, tensor: Tensor) -> bool:
        """Return whether ``param`` may become ``tensor`` itself, a view of the mapped file."""
        return False

    def problem(self, param: Tensor, num_keys: int) -> str | None:
        """Return why this loader cannot fill ``param`` from so many keys; None = it can."""
        return None if num_keys <= 1 else f"takes one key; got {num_keys}"


@dataclass(frozen=True)
class Mapped(Loader):
    """The whole tensor, left in the memory-mapped file where device and dtype are the same.

    For tables of which a request reads a few rows: only pages that were read take memory, and the
    system can drop them again. An update changes the process's own copy of a page, never the file.
    """

    def keeps(self, param: Tensor, tensor: Tensor) -> bool:
        return (param.device, param.dtype) == (tensor.device, tensor.dtype)


@dataclass(frozen=True)
class Sharded(Loader):
    """This rank's slice of dimension ``dim``; ``replicate`` neighbouring ranks share a slice."""

    dim: int
    rank: int
    world: int
    replicate: int = 1

    def __post_init__(self) -> None:
        _check_ranks("sharded", self.rank, self.world, (self.replicate,))

    def problem(self, param: Tensor, num_keys: int) -> str | None:
        if not -param.dim() <= self.dim < param.dim():
            return f"needs a dim of {list(param.shape)}; got {self.dim}"
        return super().problem(param, num_keys)

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return _grown(param, self.dim, param.shape[self.dim] * (self.world // self.replicate))

    def region(self, param: Tensor, shard_id: int | None) -> Region | None:
        return _slice(param, self.dim, param.shape[self.dim], self.rank, self.world, self.replicate)


@dataclass(frozen=True)
class Fused(Loader):
    """Several tensors side by side along ``dim``; leg i has ``sizes[i]`` entries on this rank."""

    sizes: tuple[int, ...]
    dim: int = 0
    rank: int = 0
    world: int = 1
    replicate: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_ranks("fused", self.rank, self.world, self.replicate)
        if len(self.replicate) != len(self.sizes):
            raise PluginContractError(
                f"fused needs one replicate per leg; got {self.replicate} for sizes {self.sizes}."
            )

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        leg = shard_id or 0
        return _grown(param, self.dim, self.sizes[leg] * (self.world // self.replicate[leg]))

    def region(self, param: Tensor, shard_id: int | None) -> Region | None:
        leg = shard_id or 0
        size = self.sizes[leg]
        return _slice(param, self.dim, size, self.rank, self.world, self.replicate[leg])

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        leg = shard_id or 0
        param.narrow(self.dim, sum(self.sizes[:leg]), self.sizes[leg]).copy_(tensor)

    def problem(self, param: Tensor, num_keys: int) -> str | None:
        if num_keys != len(self.sizes):
            return f"takes one key per leg; got {num_keys} keys for sizes {self.sizes}"
        if not -param.dim() <= self.dim < param.dim() or param.shape[self.dim] != sum(self.sizes):
            return f"needs sizes that add up to dim {self.dim} of {list(param.shape)}; " \
                   f"got {self.sizes}"  # fmt: skip
        return None


replicated = Loader()
"""The whole tensor, as it is."""

mapped = Mapped()
"""The whole tensor, left in the checkpoint's file where that is possible."""


def sharded(dim: int, rank: int, world: int, replicate: int = 1) -> Sharded:
    """Return a loader that reads only slice ``rank // replicate`` of ``world // replicate``."""
    return Sharded(dim, rank, world, replicate)


def fused(
    sizes: Sequence[int],
    dim: int = 0,
    *,
    rank: int = 0,
    world: int = 1,
    replicate: int | Sequence[int] = 1,
) -> Fused:
    """Return a loader for a parameter made of several checkpoint tensors (QKV, gate-up).

    sizes: entries of each leg in the parameter, that is on this rank.  replicate: how many
    neighbouring ranks share one slice, for all legs or per leg (K and V of grouped queries).
    """
    legs = (replicate,) * len(sizes) if isinstance(replicate, int) else tuple(replicate)
    return Fused(tuple(sizes), dim, rank, world, legs)


def claim(
    param: nn.Parameter,
    *keys: ClaimKey,
    loader: Loader | None = None,
    optional: bool = False,
) -> nn.Parameter:
    """Say which checkpoint tensors fill ``param``; returns ``param``.

    Sets ``hf_keys`` [(key, shard_id)], ``weight_loader`` and ``optional``. A key that is a tuple
    names alternatives: the first one present is taken, the others are not unexpected. No key at
    all: nothing is loaded (a parameter that ``post_load`` computes). A parameter never claimed is
    loaded under its own dotted name.

    Raises: PluginContractError when loader, keys and shape do not fit together.
    """
    chosen = loader if loader is not None else replicated
    problem = chosen.problem(param, len(keys)) if keys else None
    if problem:
        raise PluginContractError(f"claim of {keys!r}: the loader {problem}. Fix its arguments.")
    empty = [key for key in keys if not key or (isinstance(key, tuple) and not all(key))]
    if empty:
        raise PluginContractError(f"claim needs non-empty keys; got {keys!r}.")
    attributes: Any = param
    single = len(keys) == 1 and not isinstance(chosen, Fused)
    attributes.hf_keys = [(key, None if single else i) for i, key in enumerate(keys)]
    attributes.weight_loader = chosen
    attributes.optional = optional
    return param


@dataclass(frozen=True, slots=True)
class Claim:
    """One leg of one parameter: where it may come from and how it gets in."""

    owner: str
    param: Tensor
    keys: tuple[str, ...]
    shard_id: int | None
    loader: Loader
    optional: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.loader.shape(self.param, self.shard_id)


def collect_claims(model: nn.Module) -> list[Claim]:
    """Return every claim of a model's parameters and claimed buffers.

    Raises: DuplicateClaimError for a key that is the first choice of two claims;
        PluginContractError for a parameter without storage.
    """
    names: dict[int, tuple[Tensor, list[str]]] = {}
    held: list[tuple[str, Tensor]] = list(model.named_parameters(remove_duplicate=False))
    held += [b for b in model.named_buffers(remove_duplicate=False) if hasattr(b[1], "hf_keys")]
    for name, tensor in held:
        names.setdefault(id(tensor), (tensor, []))[1].append(name)
    claims: list[Claim] = []
    owners: dict[str, str] = {}
    for param, aliases in names.values():
        owner = aliases[0]
        hf_keys = getattr(param, "hf_keys", [(tuple(aliases), None)])
        if hf_keys and param.is_meta:
            raise PluginContractError(
                f"parameter {owner!r} must have storage; got the meta device. "
                "Build the module on its device."
            )
        for key, shard_id in hf_keys:
            keys = (key,) if isinstance(key, str) else tuple(key)
            if keys[0] in owners:
                raise DuplicateClaimError(
                    f"checkpoint tensor {keys[0]!r} must have one claim; got parameters "
                    f"{owners[keys[0]]!r} and {owner!r}. Share the parameter or fix a key."
                )
            owners[keys[0]] = owner
            loader = getattr(param, "weight_loader", None) or replicated
            optional = bool(getattr(param, "optional", False))
            claims.append(Claim(owner, param, keys, shard_id, loader, optional))
    return claims


def _check_ranks(what: str, rank: int, world: int, replicate: Sequence[int]) -> None:
    if world < 1 or not 0 <= rank < world or any(r < 1 or world % r for r in replicate):
        raise PluginContractError(
            f"{what} needs 0 <= rank < world and world divisible by replicate; "
            f"got rank {rank}, world {world}, replicate {tuple(replicate)}."
        )


def _grown(param: Tensor, dim: int, size: int) -> tuple[int, ...]:
    shape = list(param.shape)
    shape[dim] = size
    return tuple(shape)


def _slice(
    param: Tensor, dim: int, size: int, rank: int, world: int, replicate: int
) -> Region | None:
    if world == replicate:
        return None
    return Region(dim % param.dim(), rank // replicate * size, size)
