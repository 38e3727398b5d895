"""What one embodiment sees and does: the modality configs of ``processor_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phyai.errors import CheckpointError
from phyai.models.gr00t.processing.poses import WIDTHS

MODALITIES = ("video", "state", "action", "language")
_WORDS = {
    "rep": ("ABSOLUTE", "RELATIVE", "DELTA"),
    "type": ("NON_EEF", "EEF"),
    "format": ("DEFAULT", *(name for name in WIDTHS if name != "DEFAULT")),
}


@dataclass(frozen=True, slots=True)
class ActionConfig:
    """How one action key is expressed.

    rep: ABSOLUTE commands, or RELATIVE to the last state of ``state_key``; DELTA commands pass
        through like absolute ones.  type: EEF poses compose as matrices, NON_EEF values add.
    """

    rep: str = "ABSOLUTE"
    type: str = "NON_EEF"
    format: str = "DEFAULT"
    state_key: str | None = None


@dataclass(frozen=True, slots=True)
class Modality:
    """One of video, state, action and language: its keys, in order, and the steps they span."""

    keys: tuple[str, ...] = ()
    delta_indices: tuple[int, ...] = (0,)
    sin_cos: frozenset[str] = frozenset()
    mean_std: frozenset[str] = frozenset()
    actions: tuple[ActionConfig, ...] = ()

    @property
    def steps(self) -> int:
        return len(self.delta_indices)


@dataclass(frozen=True, slots=True)
class EmbodimentModalities:
    """The four modalities of one embodiment tag."""

    tag: str
    video: Modality
    state: Modality
    action: Modality
    language: Modality

    @classmethod
    def from_json(cls, tag: str, data: Any) -> EmbodimentModalities:
        """Return the modalities of one entry of ``modality_configs``.

        Raises: CheckpointError naming the tag and the field that is missing or of another form.
        """
        if not isinstance(data, Mapping):
            raise _bad(tag, "", "an object with video, state, action and language", data)
        return cls(tag, *(_modality(tag, name, data.get(name)) for name in MODALITIES))


def _modality(tag: str, name: str, data: Any) -> Modality:
    if not isinstance(data, Mapping):
        raise _bad(tag, name, "an object with delta_indices and modality_keys", data)
    keys = _names(tag, f"{name}.modality_keys", data.get("modality_keys"))
    if not keys:
        raise _bad(tag, f"{name}.modality_keys", "a list of at least one name", [])
    if len(set(keys)) != len(keys):
        raise _bad(tag, f"{name}.modality_keys", "a list of different names", list(keys))
    steps = data.get("delta_indices")
    if not isinstance(steps, list) or not steps or not all(type(n) is int for n in steps):
        raise _bad(tag, f"{name}.delta_indices", "a list of at least one integer", steps)
    return Modality(
        keys,
        tuple(steps),
        frozenset(
            _names(tag, f"{name}.sin_cos_embedding_keys", data.get("sin_cos_embedding_keys"))
        ),
        frozenset(
            _names(tag, f"{name}.mean_std_embedding_keys", data.get("mean_std_embedding_keys"))
        ),
        _actions(tag, keys, data.get("action_configs")) if name == "action" else (),
    )


def _optional(tag: str, name: str, field: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    return _names(tag, f"{name}.{field}", data.get(field))


def _names(tag: str, field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise _bad(tag, field, "a list of names", value)
    return tuple(value)


def _actions(tag: str, keys: tuple[str, ...], value: Any) -> tuple[ActionConfig, ...]:
    """Return one config per action key; absolute ones when the file has none."""
    if value is None:
        return tuple(ActionConfig(state_key=key) for key in keys)
    field = "action.action_configs"
    if not isinstance(value, list) or len(value) != len(keys):
        raise _bad(tag, field, f"a list of {len(keys)} objects, one per action key", value)
    out = []
    for key, entry in zip(keys, value, strict=True):
        if not isinstance(entry, Mapping):
            raise _bad(tag, f"{field} of {key!r}", "an object", entry)
        words = {name: _word(tag, f"{field} of {key!r}", name, entry.get(name)) for name in _WORDS}
        state_key = entry.get("state_key") or key
        if not isinstance(state_key, str):
            raise _bad(tag, f"{field} of {key!r}: state_key", "a name or null", state_key)
        out.append(ActionConfig(**words, state_key=state_key))
    return tuple(out)


def _word(tag: str, field: str, name: str, value: Any) -> str:
    """Return an enumeration's name; files hold names, older ones the lower-case values."""
    choices = _WORDS[name]
    if value is None:
        return choices[0]
    # Values are spelt like the names, with other signs: "xyz+rot6d", "non_eef".
    word = str(value).upper().replace("+", "_").replace("-", "_")
    if word not in choices:
        raise _bad(tag, f"{field}: {name}", f"one of {', '.join(choices)}", value)
    return word


def _bad(tag: str, field: str, rule: str, got: Any) -> CheckpointError:
    where = f"modality_configs[{tag!r}]{f'.{field}' if field else ''}"
    return CheckpointError(f"{where} must be {rule}; got {got!r}. Correct processor_config.json.")
