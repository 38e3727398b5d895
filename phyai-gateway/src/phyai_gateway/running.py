"""From the command line's settings to a running process, and back down on a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from phyai_gateway import certificate, reflection
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
    is_loopback,
    known_protocols,
)
from phyai_gateway.listens import listens_of, option_endpoint
from phyai_gateway.messages import Fault
from phyai_gateway.protocols.base import MIB, Limits, Listener, ListenerOptions
from phyai_gateway.router import RouteSettings
from phyai_gateway.share import Share
from phyai_gateway.tls import TlsFiles
from phyai_gateway.tokens import TokenStore
from phyai_gateway.workers import Supervisor, check_free, command, follow_parent, share_of

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
    reflection: bool = False
    share: Share = field(default_factory=Share)


def protocols() -> list[str]:
    """Return the names that ``--listen`` takes."""
    return sorted(known_protocols())


def plan_of(args: argparse.Namespace) -> Plan:
    """Check the settings; raises ConfigError, TokenFileError."""
    for name in ("timeout", "max_observation_age", "probe_period", "probe_timeout", "grace"):
        value = getattr(args, name)
        if not math.isfinite(value) or not 0 < value <= 3600:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be above 0 and up to 3600 seconds; got {value}.")
    for name, most in (("queue", 100_000), ("slots", 1024), ("max_message_mib", 2047)):
        value = getattr(args, name)
        if not 1 <= value <= most:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 to {most}; got {value}.")
    if not 0 <= args.http_port <= 65535:
        raise ConfigError(f"--http-port must be 0 to 65535; got {args.http_port}.")
    if args.state is not None and not args.state.absolute().parent.is_dir():
        raise ConfigError("folder of --state must exist; it does not. Create it.")
    if args.state is not None and args.state.exists() and not args.state.is_file():
        raise ConfigError("--state must be a file; it is another thing. Give a file's name.")
    if args.reflection:
        reflection.check()
    share = share_of(args)
    backends = [
        (model, format_endpoint(*option_endpoint("--backend", where, any_port=False)))
        for model, where in args.backend
    ]
    return Plan(
        settings=_settings(args, share),
        backends=tuple(backends),
        http=(args.http_host.strip("[]"), args.http_port + share.index),
        admin=_admin(args.admin, share) if args.admin else None,
        http_model=args.http_model,
        http_options={"rlinf_envelope": args.rlinf_envelope},
        listens=tuple(listens_of(args)),
        tls=_tls(args),
        tokens=TokenStore.read(args.token_file) if args.token_file else None,
        insecure=args.insecure_bind,
        limits=Limits(max_message_bytes=args.max_message_mib * MIB),
        backend_ca=args.backend_ca,
        backend_token=_secret(args.backend_token_file) if args.backend_token_file else None,
        reflection=args.reflection,
        share=share,
    )


def _admin(text: str, share: Share) -> tuple[str, int]:
    host, port = option_endpoint("--admin", text)
    if share.many and not 0 < port <= 65536 - share.count:
        raise ConfigError(f"--admin must be a fixed port with --workers; got {port}.")
    return host, port + share.index


def _settings(args: argparse.Namespace, share: Share) -> GatewaySettings:
    return GatewaySettings(
        share=share,
        route=RouteSettings(
            default_timeout_s=args.timeout, max_observation_age_s=args.max_observation_age
        ),
        probe=ProbeSettings(period_s=args.probe_period, timeout_s=args.probe_timeout),
        slots=args.slots,
        queue_per_backend=args.queue,
        allow_mixed=args.allow_mixed,
        state=args.state,
        backends_file=args.backends_file,
        grace_s=args.grace,
    )


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
        files = ", ".join(str(file) for file in (found.cert, found.key, found.client_ca) if file)
        raise ConfigError(
            f"TLS files must be a PEM certificate and its key; got {files}: {reason}."
        ) from None
    certificate.warn(args.tls_cert)
    return found


def _secret(path: Path) -> str:
    try:
        found = path.read_text("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise ConfigError(f"--backend-token-file cannot be read: {reason}.") from None
    if not found or not found.isprintable() or " " in found:
        raise ConfigError("--backend-token-file must hold one token; it does not.")
    return found


def _authority(path: Path) -> bytes:
    try:
        ssl.create_default_context(cafile=str(path))
        return path.read_bytes()
    except OSError as error:  # ssl.SSLError is one
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"--backend-ca must be a readable PEM certificate: {reason}.") from None


# ---------------------------------------------------------------- running


def connector(plan: Plan) -> Callable[[str, str], Backend]:
    """Return what makes connections to model servers."""
    import grpc

    from phyai_gateway.native_client import NativeBackend

    credentials = None
    if plan.backend_ca is not None:
        credentials = grpc.ssl_channel_credentials(_authority(plan.backend_ca))

    def connect(endpoint: str, model: str) -> Backend:
        return NativeBackend(endpoint, model, credentials=credentials, token=plan.backend_token)

    return connect


def make_listeners(plan: Plan, gateway: Gateway) -> list[tuple[Listener, str]]:
    """Return the listeners with where they are to bind; raises ConfigError."""

    def options(host: str, port: int, **more: Any) -> ListenerOptions:
        return ListenerOptions(
            *(host, port, plan.tls, plan.tokens, plan.limits),
            observer=gateway.metrics,
            reflection=plan.reflection and is_loopback(host),
            **more,
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
        shared = plan.share.many and getattr(kind, "shares_port", False)
        if not (plan.share.first or shared):
            continue  # its clients are known by their connection: one process must have them all
        port = kind.default_port if listen.port is None else listen.port
        own = dict(listen.options)
        model = own.pop("model", None)  # of clients that can't name one
        try:
            more = {"options": own, "default_model": model, "reuse_port": shared}
            made = options(listen.host, port, **more)
            listener = kind(gateway.router, made)
        except Fault as fault:
            raise ConfigError(f"--listen {listen.protocol}: {fault.message}") from None
        found.append((listener, listen.host))
    return found


async def run(plan: Plan, say: Say = print) -> int:
    """Serve until a signal; returns the exit status. Raises ConfigError, OSError at start."""
    gateway = Gateway(connector(plan), plan.settings)
    stop, force = asyncio.Event(), asyncio.Event()
    if plan.share.many:
        follow_parent(stop.set)
        say = say if plan.share.first else _quiet
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
        whole = drained.done() and not force.is_set() and drained.result()
        for task in (drained, forced):
            task.cancel()
        return 0 if whole else 1
    finally:
        await gateway.stop()


def _quiet(text: str) -> None:
    """Say nothing: worker 0 says it."""


async def supervise(plan: Plan, argv: Sequence[str], say: Say = print) -> int:
    """Keep the workers until a signal; returns the exit status. Raises ConfigError at start."""
    gateway = Gateway(connector(plan), replace(plan.settings, backends_file=None))
    kinds = [(listen, find_listener(listen.protocol)) for listen in plan.listens]
    make_listeners(plan, gateway)  # what is wrong with them is said once, and before any starts
    bases = [plan.http, *([plan.admin] if plan.admin else [])]
    ports = [(host, port + k) for host, port in bases for k in range(plan.share.count)]
    for listen, kind in kinds:
        port = kind.default_port if listen.port is None else listen.port
        ports.append((listen.host, port))
    check_free(ports)
    alone = sorted({k.name for _, k in kinds if not getattr(k, "shares_port", False)})
    say(
        f"{plan.share.count} workers share the ports; worker 0 alone has "
        f"{', '.join(alone) or 'no other'}, and worker K its status page on HTTP port + K."
    )
    return await Supervisor(command(argv), plan.share.count).run()


async def _started(listener: Listener, host: str) -> int:
    try:
        return await listener.start()
    except OSError as error:
        reason = error.strerror or str(error)
        options = getattr(listener, "options", None)
        where = host if options is None else format_endpoint(host, options.port)
        raise ConfigError(
            f"{listener.name} cannot listen on {where}: {reason}. Choose another port."
        ) from None


def _introduce(gateway: Gateway, plan: Plan, say: Say) -> None:
    for warning in gateway.warnings:
        log.warning("exposed: %s", warning)
    admin = [plan.admin[0]] if plan.admin else []
    local = [is_loopback(listen.host) for listen in plan.listens]
    if plan.reflection and not all(local):
        log.warning("--reflection is for listeners that only this machine reaches; others lack it")
    if all(local) and all(map(is_loopback, [plan.http[0], *admin])):
        say(
            "Only this machine can connect. To open a listener to robots, give it the address of "
            "this machine and a protection:\n"
            "  tokens:        --gateway ADDRESS:50111 --token-file tokens.json\n"
            "  TLS:           --gateway ADDRESS:50111 --tls-cert cert.pem --tls-key key.pem\n"
            "  LeRobot, which can send neither, inside a network that you trust:\n"
            "                 --lerobot ADDRESS:8080 --insecure-bind"
        )
    if not gateway.members():
        way = "to --backends-file" if plan.share.many else "by POST /v1/backends"
        say(f"No backend yet: add one {way} or --backend MODEL HOST:PORT.")


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
        gateway.reread()
        for listener, _ in listeners:
            renew = getattr(listener, "reload_tls", None)  # gRPC's follow the files by themselves
            if renew is not None:
                try:
                    renew()
                except (OSError, ssl.SSLError) as error:
                    log.error("TLS files were not taken: %s", type(error).__name__)

    loop.add_signal_handler(signal.SIGTERM, ask)
    loop.add_signal_handler(signal.SIGINT, ask)
    loop.add_signal_handler(signal.SIGHUP, reload)
