"""Tokens with names and scopes; only their hashes stay in memory."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phyai_gateway.messages import Fault

Scope = Literal["infer", "admin"]
SCOPES: tuple[Scope, ...] = ("infer", "admin")
SHORTEST = 16  # characters: shorter ones can be guessed over a fast network
MAX_FILE_BYTES = 1 << 20


class TokenFileError(ValueError):
    """A token file that cannot be used; the message names the rule and never a token."""


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    digest: bytes
    scopes: frozenset[str]


class TokenStore:
    """Who may do what.

    >>> store = TokenStore.of({"arm": ("a-long-enough-secret", ("infer",))})
    >>> store.check("a-long-enough-secret", "infer")
    'arm'
    """

    def __init__(self, entries: Iterable[_Entry]) -> None:
        self._entries = tuple(entries)

    @classmethod
    def of(cls, tokens: Mapping[str, tuple[str, Iterable[str]]]) -> TokenStore:
        """Make a store of name -> (token, scopes); raises TokenFileError."""
        return cls([_entry(name, token, scopes) for name, (token, scopes) in tokens.items()])

    @classmethod
    def read(cls, path: Path) -> TokenStore:
        """Read a JSON file {name: {"token": text, "scopes": ["infer", "admin"]}}.

        Raises TokenFileError also where others than the owner may read it. The group may where root
        owns the file and another user reads it: so a cluster mounts secrets.
        """
        try:
            with path.open("rb") as file:
                _refuse_wide(os.fstat(file.fileno()))
                data = json.loads(file.read(MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, TokenFileError):
                raise
            raise TokenFileError(
                f"token file must be readable JSON; {str(path)!r} is not: "
                f"{getattr(error, 'strerror', None) or 'no JSON'}. Write "
                '{"NAME": {"token": "...", "scopes": ["infer"]}}.'
            ) from None
        return cls(_parse(data))

    def check(self, presented: str | None, scope: Scope) -> str:
        """Return the name of the token's owner.

        Raises Fault: unauthenticated for a missing or unknown one, permission_denied for a scope
        it lacks.
        """
        digest = _digest(presented or "")
        # Every entry is compared, so that the time tells nothing about which one matched.
        found = [e for e in self._entries if hmac.compare_digest(e.digest, digest)]
        if presented is None or not found:
            raise Fault(
                "unauthenticated",
                "a known token is needed; got none or an unknown one. Send it as "
                "'Authorization: Bearer TOKEN'.",
            )
        if scope not in found[0].scopes:
            raise Fault(
                "permission_denied",
                f"this needs a token with scope {scope!r}; got one with "
                f"{', '.join(sorted(found[0].scopes)) or 'none'}.",
            )
        return found[0].name

    def check_header(self, header: str | None, scope: Scope) -> str:
        """As ``check``, of an Authorization header: Bearer, or Api-Key as openpi sends."""
        kind, _, value = (header or "").partition(" ")
        known = kind.lower() in ("bearer", "api-key")
        return self.check(value.strip() if known and value else None, scope)


def _refuse_wide(found: os.stat_result) -> None:
    mounted = found.st_uid == 0 and os.geteuid() != 0
    if stat.S_IMODE(found.st_mode) & (0o037 if mounted else 0o077):
        raise TokenFileError(
            "token file must be readable by its owner only; got a wider mode. Run chmod 600 on it."
        )


def _parse(data: Any) -> list[_Entry]:
    if not isinstance(data, dict) or not data:
        raise TokenFileError("token file must hold a map of at least one name; got another thing.")
    entries = []
    for name, row in data.items():
        if not isinstance(row, dict) or set(row) - {"token", "scopes"} or "token" not in row:
            raise TokenFileError(f"token {name!r} must have the keys token and scopes.")
        entries.append(_entry(name, row["token"], row.get("scopes", ["infer"])))
    if len({entry.digest for entry in entries}) != len(entries):
        raise TokenFileError("tokens must differ from each other; two names share one.")
    return entries


def _entry(name: str, token: Any, scopes: Any) -> _Entry:
    if not isinstance(token, str) or len(token) < SHORTEST or not token.isascii():
        raise TokenFileError(
            f"token {name!r} must be ASCII text of at least {SHORTEST} characters. Make one with "
            "`openssl rand -hex 32`."
        )
    listed = isinstance(scopes, list | tuple)
    wanted = frozenset(map(str, scopes)) if listed else frozenset({"?"})
    if not wanted <= set(SCOPES):
        raise TokenFileError(f"scopes of token {name!r} must be of {', '.join(sorted(SCOPES))}.")
    return _Entry(name, _digest(token), wanted)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
