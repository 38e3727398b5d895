"""Sessions that move to another process: everything a store keeps, as plain data and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phyai.errors import RequestError
from phyai.session_results import frozen
from phyai.sessions import LOST_KINDS, _Session

if TYPE_CHECKING:
    from phyai.sessions import SessionStore


def exported(store: SessionStore) -> dict[str, Any]:
    """Return everything that a store keeps, as plain data for ``adopt``; it keeps what it has.

    Waits until no request holds a session.
    """
    with store._changed:
        store._changed.wait_for(lambda: store._closed or not store._held)
        now = store.clock()
        live = [
            {
                "id": name,
                "seq": session.seq,
                "idle_s": now - session.used,
                "row": {buffer: tensor.cpu() for buffer, tensor in session.slot.items()},
                "result": None if session.result is None else session.result(),
            }
            for name, session in store._live.items()
        ]
        lost = {name: kind.__name__ for name, kind in store._lost.items()}
        return {"live": live, "lost": lost, "counts": dict(store._counts)}


def adopt(store: SessionStore, kept: Mapping[str, Any]) -> None:
    """Give a store what another one of the same plugin exported; it must be empty.

    Raises: RequestError when it is not; CapacityError when the memory budget has no room.
    """
    with store._changed:
        if store._live:
            raise RequestError(
                f"a session store must be empty to adopt; got {len(store._live)} sessions. Use a "
                "new one."
            )
        if kept["live"] and store._spec is None:
            row = kept["live"][0]["row"]
            store._spec = {name: (tuple(t.shape), t.dtype) for name, t in row.items()}
        store._reserve(len(kept["live"]))
        now = store.clock()
        for one in kept["live"]:
            slot = store._free.pop()
            for buffer, tensor in slot.items():
                tensor.copy_(one["row"][buffer])
            result = None if one["result"] is None else frozen(one["result"])
            store._live[one["id"]] = _Session(slot, now - one["idle_s"], one["seq"], result)
        store._lost.update({name: LOST_KINDS[kind] for name, kind in kept["lost"].items()})
        store._counts.update(kept["counts"])
