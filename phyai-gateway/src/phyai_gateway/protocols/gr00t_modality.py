"""What a GR00T client has to send and gets, by key, from the model's contract.

``contract.extra["gr00t"]`` may give it: ``cameras``, ``frames`` (delta indices), ``state`` and
``actions`` (key -> width), ``language`` (key), ``modality_configs``.  Else the fields of the
default embodiment that a GR00T model publishes are used, else one state and one action.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phyai_gateway.contract import ModelContract
from phyai_gateway.protocols.observation import own_settings

Dialect = Literal["a", "b", "c"]
"""Generations of clients: N1 and N1.5, N1.6 and early N1.7, mid-2026."""
LANGUAGE = "annotation.human.task_description"
_SECOND, _THIRD = "__ModalityConfig_class__", "__ModalityConfig__"
_MARKS: Mapping[Dialect | None, tuple[str, ...]] = {
    "a": (_SECOND,),
    "b": (_SECOND,),
    "c": (_THIRD,),
    None: (_THIRD, _SECOND),
}
_RECORD = ("sin_cos_embedding_keys", "mean_std_embedding_keys", "action_configs")


@dataclass(frozen=True, slots=True)
class Modality:
    """Keys of one model. state, actions: key -> width; {} = any.

    frames: steps relative to now that a camera shows; one for most models.
    """

    cameras: tuple[str, ...]
    frames: tuple[int, ...] = (0,)
    state: Mapping[str, int] = field(default_factory=dict)
    actions: Mapping[str, int] = field(default_factory=dict)
    language: str = LANGUAGE
    horizon: int = 1
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, contract: ModelContract) -> Modality:
        """Return the keys that a contract publishes.

        >>> Modality.of(ModelContract("m", cameras={"front": None}, action_dim=7)).actions
        {'action': 7}
        """
        told = own_settings(contract, "gr00t") or _default_embodiment(contract)
        actions = _widths(told.get("actions"))
        return cls(
            cameras=tuple(told.get("cameras") or contract.cameras),
            frames=tuple(told.get("frames") or (0,)),
            state=_widths(told.get("state")),
            actions=actions or {"action": contract.action_dim},
            language=str(told.get("language") or LANGUAGE),
            horizon=contract.horizon or int(told.get("horizon") or 1),
            given=told.get("modality_configs") or {},
        )

    def records(self) -> dict[str, dict[str, Any]]:
        """Return modality -> record, as ``get_modality_config`` tells it."""
        if self.given:
            return {name: _record(dict(record)) for name, record in self.given.items()}
        rows = list(range(self.horizon))
        return {
            "video": _record({"delta_indices": list(self.frames), "modality_keys": self.cameras}),
            "state": _record({"delta_indices": [0], "modality_keys": self.state or ("state",)}),
            "action": _record({"delta_indices": rows, "modality_keys": self.actions}),
            "language": _record({"delta_indices": [0], "modality_keys": (self.language,)}),
        }

    def reply(self, dialect: Dialect | None) -> dict[str, Any]:
        """Return the records in the form that a generation of clients reads.

        None = not known yet: a form that the later two read. Clients ask this before they send
        their first array, and nothing in the question tells them apart.
        """
        marks = dict.fromkeys(_MARKS[dialect], True)
        found = self.records()
        if dialect == "a":
            return {
                name: {**marks, "as_json": _old_json(name, record)}
                for name, record in found.items()
            }
        return {name: {**marks, "as_json": record} for name, record in found.items()}


def _record(given: dict[str, Any]) -> dict[str, Any]:
    keys = list(given["modality_keys"])
    plain = {"delta_indices": list(given["delta_indices"]), "modality_keys": keys}
    return plain | {name: given.get(name) for name in _RECORD}


def _old_json(modality: str, record: Mapping[str, Any]) -> str:
    """The oldest clients know two fields, and full key names."""
    keys = [
        key if modality == "language" or key.startswith(f"{modality}.") else f"{modality}.{key}"
        for key in record["modality_keys"]
    ]
    return json.dumps({"delta_indices": record["delta_indices"], "modality_keys": keys})


def _default_embodiment(contract: ModelContract) -> Mapping[str, Any]:
    known = contract.extra.get("embodiments")
    if not isinstance(known, Mapping):
        return {}
    found = known.get(contract.extra.get("embodiment"), {})
    return found if isinstance(found, Mapping) else {}


def _widths(found: object) -> dict[str, int]:
    return {str(k): int(v) for k, v in found.items()} if isinstance(found, Mapping) else {}
