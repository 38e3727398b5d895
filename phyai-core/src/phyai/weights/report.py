"""What a load did, and how lists of tensor names read in messages."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Names are the model's (after ``remap``). ``casts``: "F32->BF16" -> number of tensors.

    ignored: tensors matched by ``ignore``, dropped by ``remap``, or second choices not needed.

    >>> from phyai.weights import LoadReport
    >>> print(LoadReport(loaded=("a", "b"), bytes_read=2_500_000, seconds=0.5, source="model"))
    loaded 2 tensors, 2.5 MB in 0.5 s from model
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    optional_missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    casts: Mapping[str, int] = field(default_factory=dict)
    bytes_read: int = 0
    seconds: float = 0.0
    source: str = ""

    def __str__(self) -> str:
        size = _size(self.bytes_read)
        head = f"loaded {len(self.loaded)} tensors, {size} in {self.seconds:.1f} s"
        lines = [f"{head} from {self.source}"]
        if self.casts:
            lines.append("  casts: " + ", ".join(f"{k} x{n}" for k, n in self.casts.items()))
        for label in ("missing", "optional_missing", "unexpected", "ignored"):
            names: tuple[str, ...] = getattr(self, label)
            if names:
                word = label.replace("_", ", ")
                lines.append(f"  {word}: {len(names)} ({list_names(names, shown=3)})")
        return "\n".join(lines)


def list_names(
    names: Sequence[str], *, notes: Mapping[str, str] | None = None, shown: int = _SHOWN
) -> str:
    """Return up to ``shown`` quoted names with their notes, then the count of the rest."""
    notes = notes or {}
    parts = [f"{name!r}{notes.get(name, '')}" for name in names[:shown]]
    if len(names) > shown:
        parts.append(f"and {len(names) - shown} more")
    return ", ".join(parts)


def nearest_notes(
    names: Iterable[str], choices: Collection[str], phrase: str, *, shown: int = _SHOWN
) -> dict[str, str]:
    """Return name -> `` (<phrase> 'closest')`` for the first names that have a close choice."""
    notes = {}
    for name in list(names)[:shown]:
        close = nearest(name, choices)
        if close:
            notes[name] = f" ({phrase} {close!r})"
    return notes


def nearest(name: str, choices: Collection[str]) -> str | None:
    """Return the choice closest to ``name``, preferring those that end alike."""
    tail = name.rsplit(".", 1)[-1]
    alike = [choice for choice in choices if choice.rsplit(".", 1)[-1] == tail]
    for group in (alike, choices):
        close = difflib.get_close_matches(name, list(group), n=1, cutoff=0.6)
        if close:
            return close[0]
    return None


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.1f} {unit}" if unit != "B" else f"{count} B"
        amount /= 1000
    return f"{amount:.1f} GB"
