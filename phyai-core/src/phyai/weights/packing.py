"""Modules that keep weights in a kernel's layout: packed when complete, unpacked to be changed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from phyai.errors import PluginContractError

MAX_OPEN = 8
"""Modules an update keeps unpacked: those of a decoder layer, in whatever order they come."""


@runtime_checkable
class Packs(Protocol):
    """A module whose ``weight`` moves into another layout: ``phyai.layers.Linear``, or yours.

    While packed, ``weight`` has its shape and dtype but no values: reading it as data, as
    ``state_dict`` does, needs ``unpack`` first. A ``post_load`` hook finds the weights of its own
    module and of those below it unpacked.
    """

    weight: nn.Parameter

    def pack(self) -> None:
        """Lay the weight out and free it; nothing to do when that is done."""

    def unpack(self) -> None:
        """Give the weight its values back; nothing to do when it has them."""


class Packer:
    """Packs each weight as soon as its last part is loaded, so that no two copies of a model live.

    parts: the parameter of every read to come.
    """

    def __init__(self, model: nn.Module, parts: Iterable[Tensor]) -> None:
        self._owners = owners(model)
        self._left = Counter(id(param) for param in parts)

    def writing(self, param: Tensor) -> None:
        """Make a parameter writable before its first part is written."""
        if (owner := self._owners.get(id(param))) is not None:
            owner.unpack()

    def filled(self, param: Tensor) -> None:
        """Note that one part of a parameter was loaded."""
        self._left[id(param)] -= 1
        if self._left[id(param)] == 0 and (owner := self._owners.get(id(param))) is not None:
            owner.pack()


class Opener:
    """Unpacks what is being overwritten, a few modules at a time; leaving packs them.

    More than one, because the legs of a fused layer need not be neighbours: a format that rounds
    them together must see all of them anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = owners(model)
        self._open: OrderedDict[int, Packs] = OrderedDict()

    def __enter__(self) -> Opener:
        return self

    def __exit__(self, *problem: object) -> None:
        while self._open:
            self._open.popitem()[1].pack()

    def writing(self, param: Tensor) -> None:
        """Make a parameter writable."""
        owner = self._owners.get(id(param))
        if owner is None:
            return
        self._open[id(param)] = owner
        self._open.move_to_end(id(param))
        owner.unpack()
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)[1].pack()


def owners(model: nn.Module) -> dict[int, Packs]:
    """Return the modules that pack, by the identity of their weight."""
    return {id(module.weight): module for module in model.modules() if isinstance(module, Packs)}


@contextmanager
def unpacked(module: nn.Module) -> Iterator[None]:
    """Have every weight of a module in place, as it was loaded; packed again on leaving."""
    held = list(owners(module).values())
    for owner in held:
        owner.unpack()
    try:
        yield
    finally:
        for owner in held:
            owner.pack()


def refuse_empty(module: nn.Module, *_: object) -> None:
    """Raise PluginContractError: the state of a packed module would hold no values.

    A state-dict hook of modules that pack.
    """
    if getattr(module, "is_packed", False):
        raise PluginContractError(
            f"state_dict needs the weights of {type(module).__name__}; they are in their kernel's "
            "layout. Use phyai.weights.unpacked(model)."
        )


def pack_all(model: nn.Module) -> None:
    """Pack whatever is not packed yet."""
    for module in owners(model).values():
        module.pack()
