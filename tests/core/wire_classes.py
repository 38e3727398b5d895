"""Classes that a decoder must not make: theirs is code that would run."""

from __future__ import annotations

import dataclasses

RAN: list[str] = []
"""What ran of them."""


class NewOfItsOwn:
    def __new__(cls) -> NewOfItsOwn:
        RAN.append("new")
        return super().__new__(cls)


@dataclasses.dataclass
class MadeByNew(NewOfItsOwn):
    a: int = 1


@dataclasses.dataclass
class Setter:
    a: int = 1


Setter.a = property(lambda self: 1, lambda self, value: RAN.append("set"))  # type: ignore
