"""From the command line's settings to a running process, and back down on a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai_gateway.backends import Backend
from phyai_gateway.gateway import Gateway, GatewaySettings
from phyai_gateway.health import ProbeSettings
from phyai_gateway.http_api import HttpApi
from phyai_gateway.listeners import (
    ConfigError,
    Listen,
    check_exposure,
    find_listener,
    format_endpoint,
    known_protocols,
    parse_endpoint,
    parse_listen,
)
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import MIB, Limits, Listener, ListenerOptions
from phyai_gateway.router import RouteSettings
from phyai_gateway.tls import TlsFiles
from phyai_gateway.tokens import TokenStore

log = logging.getLogger("phyai_gateway")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a process needs, checked. admin: address of the management's own port."""

    settings: GatewaySettings
    backends: tuple[tuple[str, str], ...]
    http: tuple[str, int]
    admin: tuple[str, int] | None
    http_model: str | None
    http_options: Mapping[str, str]
    listens: tuple[Listen, ...]
    tls: TlsFiles | None
    tokens: TokenStore | None
    insecure: bool
    limits: Limits
    backend_ca: Path | None
    backend_token: str | None


def protocols() -> list[str]:
    """Return the names that ``--listen`` takes."""
    return sorted(known_protocols())


def plan_of(args: argparse.Namespace) -> Plan:
    """Check the settings; raises ConfigError, TokenFileError."""
    for name in ("timeout", "max_observation_age", "probe_period", "probe_timeout", "grace"):
        value = getattr(args, name)
        if not math.isfinite(value) or not 0 < value <= 3600:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be seconds up to 3600; got {value}.")
    for name, most in (("queue", 100_000), ("slots", 1024), ("max_message_mib", 2047)):
        value = getattr(args, name)
        if not 1 <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 to {most}; got {value}.")
    if not 0 <= args.http_port <= 65535:
        raise ConfigError(f"--http-port must be 0 to 65535; got {args.http_port}.")
    if args.state is not None and not args.state.absolute().parent.is_dir():
        raise ConfigError("folder of --state must exist; it does not. Create it.")
    backends = [(model, format_endpoint(*parse_endpoint(where))) for model, where in args.backend]
    return Plan(
        settings=_settings(args),
        backends=tuple(backends),
        http=(args.http_host.strip("[]"), args.http_port),
        admin=parse_endpoint(args.admin, any_port=True) if args.admin else None,
        http_model=args.http_model,
        http_options={"rlinf_envelope": args.rlinf_envelope},
        listens=tuple(_listens(args)),
        tls=_tls(args),
        tokens=TokenStore.read(args.token_file) if args.token_file else None,
        insecure=args.insecure_bind,
        limits=Limits(max_message_bytes=args.max_message_mib * MIB),
        backend_ca=args.backend_ca,
        backend_token=_secret(args.backend_token_file) if args.backend_token_file else None,
    )


def _settings(args: argparse.Namespace) -> GatewaySettings:
    return GatewaySettings(
        route=RouteSettings(
            default_timeout_s=args.timeout, max_observation_age_s=args.max_observation_age
        ),
        probe=ProbeSettings(period_s=args.probe_period, timeout_s=args.probe_timeout),
        slots=args.slots,
        queue_per_backend=args.queue,
        allow_mixed=args.allow_mixed,
        state=args.state,
        grace_s=args.grace,
    )


def _listens(args: argparse.Namespace) -> list[Listen]:
    host, port = parse_endpoint(args.gateway, any_port=True)
    found = [Listen("native", host, port), *map(parse_listen, args.listen)]
    options = {"fps": args.lerobot_fps, "similarity_atol": args.lerobot_similarity_atol}
    given = {key: value for key, value in options.items() if value is not None}
    age = {"max_observation_age_s": str(args.max_observation_age)}
    if args.lerobot_alias:
        given |= dict(_alias(pair) for pair in args.lerobot_alias)
    if args.lerobot is not None:
        host, port = parse_endpoint(args.lerobot, any_port=True)
        found.append(Listen("lerobot", host, port, age | given))
    elif given:
        raise ConfigError("--lerobot-... options need --lerobot; it is missing. Add it.")
    return found


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not name or not model:
        raise ConfigError(f"--lerobot-alias must be NAME=MODEL; got {text!r:.80}.")
    return f"alias.{name}", model


def _tls(args: argparse.Namespace) -> TlsFiles | None:
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key must be given together.")
    if args.tls_cert is None:
        if args.tls_client_ca is not None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key.")
        return None
    found = TlsFiles(args.tls_cert, args.tls_key, args.tls_client_ca)
    try:
        found.server_context()
    except (OSError, ssl.SSLError) as error:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"TLS files must be a PEM certificate and its key: {reason}.") from None
    return found


def _secret(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"--backend-token-file cannot be read: {error.strerror}.") from None


# ---------------------------------------------------------------- running


def connector(plan: Plan) -> Callable[[str, str], Backend]:
    """Return what makes connections to model servers."""
    import grpc

    from phyai_gateway.native_client import NativeBackend

    credentials = None
    if plan.backend_ca is not None:
        try:
            credentials = grpc.ssl_channel_credentials(plan.backend_ca.read_bytes())
        except OSError as error:
            raise ConfigError(f"--backend-ca cannot be read: {error.strerror}.") from None

    def connect(endpoint: str, model: str) -> Backend:
        return NativeBackend(endpoint, model, credentials=credentials, token=plan.backend_token)

    return connect


def make_listeners(plan: Plan, gateway: Gateway) -> list[tuple[Listener, str]]:
    """Return the listeners with where they are to bind; raises ConfigError."""

    def options(host: str, port: int, **more: Any) -> ListenerOptions:
        return ListenerOptions(
            host, port, plan.tls, plan.tokens, plan.limits, observer=gateway.metrics, **more
        )

    def check(kind: Any, host: str) -> None:
        risk = check_exposure(
            kind,
            host,
            tokens=plan.tokens is not None,
            tls=plan.tls is not None,
            insecure=plan.insecure,
        )
        if risk is not None:
            gateway.warnings.append(risk)

    check(HttpApi, plan.http[0])
    web: dict[str, Any] = {"default_model": plan.http_model, "options": plan.http_options}
    api = HttpApi(gateway, options(*plan.http, **web), admin=plan.admin is None)
    found: list[tuple[Listener, str]] = [(api, plan.http[0])]
    if plan.admin is not None:
        check(HttpApi, plan.admin[0])
        found.append((HttpApi(gateway, options(*plan.admin, **web), infer=False), plan.admin[0]))
    for listen in plan.listens:
        kind = find_listener(listen.protocol)
        check(kind, listen.host)
        port = kind.default_port if listen.port is None else listen.port
        try:
            listener = kind(gateway.router, options(listen.host, port, options=listen.options))
        except Fault as fault:
            raise ConfigError(f"--listen {listen.protocol}: {fault.message}") from None
        found.append((listener, listen.host))
    return found


async def run(plan: Plan, say: Say = print) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError, OSError at start."""
    gateway = Gateway(connector(plan), plan.settings)
    stop, force = asyncio.Event(), asyncio.Event()
    listeners = make_listeners(plan, gateway)
    _signals(gateway, stop, force, listeners)
    try:
        await gateway.start()
        for model, endpoint in plan.backends:
            try:
                gateway.add(model, endpoint)
            except Fault as fault:
                raise ConfigError(f"--backend: {fault.message}") from None
        for listener, host in listeners:
            port = await _started(listener, host)
            gateway.listeners.append(listener)
            say(f"{listener.name} listens on {format_endpoint(host, port)}")
        _introduce(gateway, plan, say)
        await stop.wait()
        say("draining: finishing what was accepted; a second signal stops at once")
        drained = asyncio.create_task(gateway.drain())
        forced = asyncio.create_task(force.wait())
        await asyncio.wait({drained, forced}, return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, forced):
            task.cancel()
        return 0 if not force.is_set() else 1
    finally:
        await gateway.stop()


async def _started(listener: Listener, host: str) -> int:
    try:
        return await listener.start()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{listener.name} cannot listen on {host}: {reason}.") from None


def _introduce(gateway: Gateway, plan: Plan, say: Say) -> None:
    for warning in gateway.warnings:
        log.warning("exposed: %s", warning)
    hosts = {plan.http[0], *(listen.host for listen in plan.listens)}
    if hosts <= {"127.0.0.1", "localhost", "::1"}:
        say(
            "Only this machine can connect. To open a listener to robots, give it the address of "
            "this machine and a protection:\n"
            "  tokens:        --gateway ADDRESS:50111 --token-file tokens.json\n"
            "  TLS:           --gateway ADDRESS:50111 --tls-cert cert.pem --tls-key key.pem\n"
            "  LeRobot, which can send neither, inside a network that you trust:\n"
            "                 --lerobot ADDRESS:8080 --insecure-bind"
        )
    if not gateway.members():
        say("No backend yet: add one by POST /v1/backends or --backend MODEL HOST:PORT.")


def _signals(
    gateway: Gateway,
    stop: asyncio.Event,
    force: asyncio.Event,
    listeners: list[tuple[Listener, str]],
) -> None:
    loop = asyncio.get_running_loop()

    def ask() -> None:
        (force if stop.is_set() else stop).set()

    def reload() -> None:
        for listener, _ in listeners:
            if isinstance(listener, HttpApi):
                try:
                    listener.reload_tls()
                except (OSError, ssl.SSLError) as error:
                    log.error("TLS files were not taken: %s", type(error).__name__)

    loop.add_signal_handler(signal.SIGTERM, ask)
    loop.add_signal_handler(signal.SIGINT, ask)
    loop.add_signal_handler(signal.SIGHUP, reload)
