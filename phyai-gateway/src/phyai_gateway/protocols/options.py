"""Options of one protocol, given as text."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from phyai_gateway.messages import Fault


class Settings:
    """Reads options by name and refuses those that nobody read.

    >>> Settings("lerobot", {"fps": "30"}).number("fps", 10.0)
    30.0
    """

    def __init__(self, protocol: str, given: Mapping[str, str]) -> None:
        self._protocol, self._given = protocol, dict(given)
        self._known: set[str] = set()

    def text(self, name: str, default: str | None = None) -> str | None:
        self._known.add(name)
        return self._given.get(name, default)

    def number(self, name: str, default: float) -> float:
        """Return a finite number above zero."""
        found = self.text(name)
        return default if found is None else self._positive(name, found)

    def seconds(self, name: str, default: float | None) -> float | None:
        """Return a duration above zero; 0, negative and endless ones are mistakes."""
        found = self.text(name)
        return default if found is None else self._positive(name, found)

    def prefixed(self, prefix: str) -> dict[str, str]:
        """Return the options ``PREFIX.NAME`` by NAME."""
        found = {key: value for key, value in self._given.items() if key.startswith(f"{prefix}.")}
        self._known.update(found)
        return {key.removeprefix(f"{prefix}."): value for key, value in found.items()}

    def finish(self) -> None:
        """Raise Fault for options that this protocol doesn't have."""
        unknown = sorted(set(self._given) - self._known)
        if unknown:
            raise Fault(
                "invalid_argument",
                f"options of {self._protocol} must be of {', '.join(sorted(self._known))}; got "
                f"{', '.join(unknown)}.",
            )

    def _positive(self, name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not isfinite(value) or value <= 0:
            raise Fault(
                "invalid_argument",
                f"option {name} of {self._protocol} must be a number above zero; got {text!r}.",
            )
        return value
