"""``--backends-file``: a file says which backends there are, and is followed while it changes.

The file is taken whole or not at all: with one wrong row the backends stay as they were, and log,
status page and metric say so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phyai_gateway.backends import Member, server_id
from phyai_gateway.listeners import ConfigError
from phyai_gateway.messages import Fault

log = logging.getLogger(__name__)
MAX_BYTES = 4 << 20
KEYS = frozenset({"model_name", "endpoint", "weight"})
YAML_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Row:
    """One backend as the file has it."""

    model: str
    endpoint: str
    weight: float = 1.0


class Registry(Protocol):
    """What of the gateway the file changes."""

    def check(self, model: Any, endpoint: Any, weight: Any) -> tuple[str, str]:
        """Return model and endpoint in their usual form; raises Fault."""

    def add(self, model: str, endpoint: str, *, weight: float = 1.0) -> Member: ...
    def remove(self, server: str) -> Member: ...
    def patch(self, server: str, *, state: str | None, weight: float | None) -> Member: ...


class BackendsFile:
    """The backends of one file; ``owned`` are the ids that it brought in."""

    def __init__(self, path: Path, registry: Registry) -> None:
        self.path, self._registry = path, registry
        self.owned: dict[str, Row] = {}
        self.error: str | None = None
        self._stamp: object = None
        self._reading = asyncio.Lock()

    def load(self) -> None:
        """Take the file at the start; raises ConfigError, as nothing is there that could stay."""
        if not self._apply(self._stamp_now(), self._read()):
            raise ConfigError(f"--backends-file {self.error}")

    async def follow(self, *, force: bool = False) -> bool:
        """Take the file if it changed, or in any case; returns whether it was looked at.

        Never raises: what is wrong with the file stays in ``error`` until it is mended.
        """
        async with self._reading:
            now = await asyncio.to_thread(self._stamp_now)
            if now == self._stamp and not force:
                return False
            found, before = await asyncio.to_thread(self._read), self.owned
            if self._apply(now, found) and self.owned != before:
                log.info("backends file: %d backends", len(self.owned))
            return True

    def _apply(self, stamp: object, found: list[Row] | str) -> bool:
        self._stamp = stamp
        if isinstance(found, str):
            if found != self.error:
                log.error("backends file is not taken, and the backends stay: it %s", found)
            self.error = found
            return False
        error = None
        wanted = {server_id(row.model, row.endpoint): row for row in found}
        refused = set()
        for server in self.owned.keys() - wanted.keys():
            with suppress(Fault):  # an operator removed it before
                self._registry.remove(server)
        for server, row in wanted.items():
            if self.owned.get(server) == row:
                continue  # what an operator did to it since, such as draining, stays
            try:
                self._registry.add(row.model, row.endpoint, weight=row.weight)
                self._registry.patch(server, state=None, weight=row.weight)
            except Fault as fault:
                refused.add(server)
                error = f"has a backend that cannot be added: {fault.message}"
                if error != self.error:
                    log.error("backends file: it %s", error)
        if refused:
            self._stamp = None  # tried again soon: those that leave now may make room
        self.error = error
        self.owned = {server: row for server, row in wanted.items() if server not in refused}
        return True

    def _stamp_now(self) -> object:
        try:
            found = self.path.stat()
        except OSError as error:
            return error.errno
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> list[Row] | str:
        """Return the rows, or what is wrong with the file."""
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):  # opening a pipe waits for a writer
                return "must be a file; it is another thing."
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            return f"must be readable; {str(self.path)!r} is not: {error.strerror}."
        if len(data) > MAX_BYTES:
            return f"must have at most {MAX_BYTES} bytes; it has more."
        try:
            found = self._parsed(data)
        except (ValueError, RecursionError) as error:
            return f"must be JSON or YAML; it is not: {str(error).splitlines()[0][:200]}."
        if not isinstance(found, list):
            return "must hold a list of {model_name, endpoint, weight}; it holds another thing."
        rows: dict[tuple[str, str], Row] = {}
        try:
            for index, item in enumerate(found):
                row = self._row(index, item)
                if rows.setdefault((row.model, row.endpoint), row) != row:
                    return f"has a wrong row: row {index + 1} gives a backend a second weight."
            return list(rows.values())
        except Fault as fault:
            return f"has a wrong row: {fault.message}"

    def _parsed(self, data: bytes) -> Any:
        if self.path.suffix.lower() not in YAML_SUFFIXES:
            return json.loads(data)
        try:
            import yaml  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise ValueError(
                "YAML needs the package PyYAML: pip install 'phyai-gateway[yaml]', or write JSON"
            ) from None
        try:
            return yaml.safe_load(data)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from None
        except (LookupError, AttributeError, TypeError):  # as PyYAML has it for !!bool x, !!int ""
            raise ValueError("a value is not of the type that its tag says") from None

    def _row(self, index: int, row: Any) -> Row:
        if (
            not isinstance(row, Mapping)
            or set(row) - KEYS
            or not {"model_name", "endpoint"} <= set(row)
        ):
            raise Fault(
                "invalid_argument",
                f"row {index + 1} must be a map of model_name, endpoint and perhaps weight.",
            )
        weight = row.get("weight", 1.0)
        try:
            model, endpoint = self._registry.check(row["model_name"], row["endpoint"], weight)
        except Fault as fault:
            raise Fault("invalid_argument", f"row {index + 1}: {fault.message}") from None
        return Row(model, endpoint, float(weight))
