"""Which listeners there are, where they may bind, and what that exposes."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from phyai_gateway.protocols.base import Listener

GROUP = "phyai.protocols"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")


class ConfigError(ValueError):
    """A setting that cannot work; the message is all that the operator sees."""


@dataclass(frozen=True, slots=True)
class Listen:
    """What was asked for with ``--listen``. port None: the protocol's default."""

    protocol: str
    host: str = "127.0.0.1"
    port: int | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def parse_endpoint(text: str, *, any_port: bool = False) -> tuple[str, int]:
    """Return host and port of HOST:PORT, [IPv6]:PORT, with or without ``grpc://``.

    any_port: 0 is allowed too. Raises ConfigError.

    >>> parse_endpoint("grpc://[::1]:50063")
    ('::1', 50063)
    """
    rest = text.removeprefix("grpc://")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        good = _is_ip(host) and ":" in host
    else:
        good = _HOST.fullmatch(host) is not None
    if not (good and colon and port.isascii() and port.isdigit() and len(port) <= 5):
        raise ConfigError(
            f"endpoint must be HOST:PORT or [IPv6]:PORT; got {text!r:.80}. Write 127.0.0.1:50063."
        )
    number = int(port)
    if not (0 if any_port else 1) <= number <= 65535:
        raise ConfigError(f"port must be {0 if any_port else 1} to 65535; got {number}.")
    return host, number


def format_endpoint(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_listen(text: str) -> Listen:
    """Return what PROTOCOL[=HOST:PORT][,key=value ...] asks for; raises ConfigError.

    >>> parse_listen("lerobot=127.0.0.1:8080,fps=30").options
    {'fps': '30'}
    """
    head, *pairs = text.split(",")
    protocol, equals, address = head.partition("=")
    host, port = parse_endpoint(address, any_port=True) if equals else ("127.0.0.1", None)
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or key in options:
            raise ConfigError(
                f"options of --listen must be key=value, once each; got {pair!r:.80}."
            )
        options[key] = value
    return Listen(protocol, host, port, options)


def known_protocols() -> dict[str, EntryPoint]:
    """Return the installed protocols by name, importing none."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def find_listener(protocol: str) -> type[Listener]:
    """Import the class of a protocol; raises ConfigError naming the installed ones."""
    known = known_protocols()
    if protocol not in known:
        close = difflib.get_close_matches(protocol, known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"protocol must be one of {', '.join(sorted(known)) or 'none'}; got "
            f"{protocol!r:.40}.{hint}"
        )
    try:
        found: Any = known[protocol].load()
    except Exception as error:
        raise ConfigError(f"protocol {protocol!r} cannot be loaded: {error}.") from error
    if not all(hasattr(found, name) for name in ("name", "default_port", "start", "drain", "stop")):
        raise ConfigError(f"protocol {protocol!r} must give a Listener class; it gives another.")
    return found  # type: ignore[no-any-return]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address."""
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def check_exposure(
    listener: type[Listener], host: str, *, tokens: bool, tls: bool, insecure: bool
) -> str | None:
    """Return what binding there risks, None for nothing.

    Raises ConfigError where others could reach it unasked and ``--insecure-bind`` is not given.
    """
    if is_loopback(host):
        return None
    name = listener.name
    by_token = tokens and getattr(listener, "takes_tokens", True)
    by_tls = tls and getattr(listener, "takes_tls", True)
    if by_token and by_tls:
        return None
    if by_token:
        return f"{name} on {host}: tokens and images travel unencrypted; add --tls-cert, --tls-key."
    if by_tls:
        return f"{name} on {host}: whoever trusts the certificate may use it; add --token-file."
    if insecure:
        return (
            f"{name} on {host}: anybody who reaches this port can use the models, fill the queue "
            "and read what robots see on the way. Keep it inside a network that you trust."
        )
    able = getattr(listener, "takes_tokens", True) or getattr(listener, "takes_tls", True)
    ways = "--token-file, or --tls-cert and --tls-key, or " if able else ""
    raise ConfigError(
        f"{name} must bind 127.0.0.1 unless it is protected; got {host}. Give {ways}"
        "--insecure-bind inside a network that you trust"
        f"{'' if able else ', as its clients can send no token'}."
    )
