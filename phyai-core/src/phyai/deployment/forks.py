"""Forks of the engine's process: they have copies of a pool's descriptors, and must not act on it.

A user's ``multiprocessing`` pool of the "fork" kind would else keep workers alive when the engine's
process dies, and end them when one of its own processes ends.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Forkable(Protocol):
    def forget(self) -> None: ...


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def forget_in_forks(what: Forkable) -> None:
    """Call its ``forget`` in every fork of this process, before anything else runs there."""
    _known.add(what)


def _forget() -> None:
    for what in list(_known):
        with contextlib.suppress(Exception):  # the copy may be of a moment between two states
            what.forget()
    _known.clear()


os.register_at_fork(after_in_child=_forget)
