"""Which listeners a server's file asks for, and whether their addresses are safe to open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai.errors import ConfigError
from phyai_gateway import certificate
from phyai_gateway.listeners import ConfigError as ListenError
from phyai_gateway.listeners import find_listener, is_loopback, parse_endpoint
from phyai_gateway.server.config import ServerOptions
from phyai_gateway.tls import TlsFiles
from phyai_gateway.tokens import TokenFileError, TokenStore


@dataclass(frozen=True, slots=True)
class Wanted:
    """One listener to start. options: the protocol's own."""

    protocol: str
    listener: Any
    host: str
    port: int
    options: Mapping[str, str] = field(default_factory=dict)


def wanted_listeners(server: ServerOptions) -> list[Wanted]:
    """Return the native listener and those of ``listen``; raises ConfigError."""
    from phyai_gateway.protocols.native import NativeListener

    found = [Wanted("native", NativeListener, _bare(server.host), server.port)]
    for protocol, address in server.listen.items():
        host, port = parse_endpoint(address, any_port=True)
        options = server.listen_options.get(protocol, {})
        found.append(Wanted(protocol, find_protocol(protocol), host, port, options))
    for one in found:
        _check_exposure(one, server)
    _check_apart(found, http_address(server))
    return found


def _check_apart(found: list[Wanted], http: tuple[str, int] | None) -> None:
    """Refuse two listeners on one address: the second would fail after the weights are loaded."""
    held: dict[tuple[str, int], str] = {} if http is None else {http: "server.http_port"}
    for one in found:
        key = "server.port" if one.protocol == "native" else f"server.listen.{one.protocol}"
        other = held.setdefault((one.host, one.port), key)
        if one.port and other != key:
            raise ConfigError(
                f"{key} must be an address of its own; got {one.port}, which is {other}'s. "
                "Choose another port."
            )


def find_protocol(name: str) -> Any:
    """Return the listener class of an installed protocol; raises ConfigError."""
    try:
        return find_listener(name)
    except ListenError as error:
        raise ConfigError(f"server.listen.{name}: {error}") from error


def http_address(server: ServerOptions) -> tuple[str, int] | None:
    """Return where health and metrics are served, None = nowhere; raises ConfigError."""
    if server.http_port is None:
        return None
    host = _bare(server.http_host or server.host)
    guarded = _is_guarded(server) or server.tls is not None
    _check_open("server.http_host", host, server, guarded=guarded)
    return host, server.http_port


def tls_files(server: ServerOptions) -> TlsFiles | None:
    """Return the certificate files; raises ConfigError when they cannot be used."""
    if server.tls is None:
        return None
    tls = server.tls
    files = TlsFiles(Path(tls.cert), Path(tls.key), Path(tls.client_ca) if tls.client_ca else None)
    try:
        files.server_context()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            "server.tls must name readable PEM files that belong together; got "
            f"{', '.join(str(f) for f in (files.cert, files.key, files.client_ca) if f)}: {error}."
        ) from error
    certificate.warn(files.cert)
    return files


def token_store(server: ServerOptions) -> TokenStore | None:
    """Return the tokens; raises ConfigError for a file that cannot be used."""
    if server.token_file is None:
        return None
    try:
        return TokenStore.read(Path(server.token_file))
    except TokenFileError as error:
        raise ConfigError(f"server.token_file: {error}") from error


def risks(server: ServerOptions, listeners: list[Wanted]) -> list[str]:
    """Return a line per listener that strangers can reach, because ``insecure_bind`` says so."""
    return [
        f"{one.protocol} on {one.host} is open to everybody who can reach it: they can run the "
        "model and see its answers."
        for one in listeners
        if not is_loopback(one.host) and not _is_guarded(server, one.listener)
    ]


def _is_guarded(server: ServerOptions, listener: Any = None) -> bool:
    """Whether clients must show a token, or a certificate, that this listener can check."""
    tokens = server.token_file is not None and getattr(listener, "takes_tokens", True)
    mutual = server.tls is not None and server.tls.client_ca is not None
    return bool(tokens or (mutual and getattr(listener, "takes_tls", True)))


def _check_exposure(one: Wanted, server: ServerOptions) -> None:
    tls = server.tls is not None and getattr(one.listener, "takes_tls", True)
    guarded = _is_guarded(server, one.listener) or tls
    key = "server.host" if one.protocol == "native" else f"server.listen.{one.protocol}"
    _check_open(key, one.host, server, guarded=guarded)


def _check_open(key: str, host: str, server: ServerOptions, *, guarded: bool) -> None:
    if is_loopback(host) or guarded or server.insecure_bind:
        return
    raise ConfigError(
        f"{key} must be a loopback address unless its clients show a token or speak TLS; got "
        f"{host!r}. Set server.token_file or server.tls, or insecure_bind: true (--insecure-bind) "
        "where everybody on the network is trusted."
    )


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
