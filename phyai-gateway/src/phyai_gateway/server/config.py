"""The YAML of a model server: the engine's keys as in ``phyai.engine_builder``, and two more.

``server:`` says where and how to listen, ``adapter:`` how requests become the engine's. Imports
neither torch nor grpc.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phyai.config_mapping import from_mapping
from phyai.engine_builder import (
    engine_args_from_mapping,
    load_yaml_mapping,
    resolve_path,
    resolve_paths,
)
from phyai.errors import ConfigError, did_you_mean
from phyai_gateway.listeners import ConfigError as ListenError
from phyai_gateway.listeners import parse_endpoint

if TYPE_CHECKING:
    from phyai.deployment import DeploymentConfig
    from phyai.engine import EngineArgs

Kind = Literal["observations", "tensors"]

FACTORIES: Mapping[str, Kind] = {
    "observations": "observations",
    "phyai.server.backends.pi05:PI05Backend": "observations",
    "tensors": "tensors",
    "phyai.server.backends.tensor:TensorBackend": "tensors",
}
MAX_MESSAGE_BYTES = 2**31 - 1
HARD_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """PEM files, relative to the YAML's folder.  client_ca: clients must show a certificate."""

    cert: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where the server listens and what it takes on. Ports: 0 = any free one.

    workers: requests given to the engine at once; null = one per replica.  max_queue: accepted
    requests that may wait for it; null = 2 * workers.  request_timeout_s: of a request without a
    deadline.  grace_seconds: for accepted requests after SIGTERM.  http_port: of health, readiness
    and metrics; null = no such port.  listen: protocol -> HOST:PORT.  warm_up: run one made-up
    observation before saying ready, which also tells what the actions look like.
    register_with: HOST:PORT of gateways that are told of the server while it is ready.  advertise:
    HOST or HOST:PORT by which they reach it; null = host and port.  register_token_file: holds a
    token with scope admin there.  register_ca: PEM to speak TLS with them.

    >>> ServerOptions("pi05").port
    50063
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 50063
    workers: int | None = None
    max_queue: int | None = None
    max_message_bytes: int = 104_857_600
    max_image_pixels: int = 4096 * 4096
    request_timeout_s: float = 10.0
    grace_seconds: float = 5.0
    http_port: int | None = 50064
    http_host: str | None = None
    token_file: str | None = None
    tls: TlsOptions | None = None
    insecure_bind: bool = False
    register_with: tuple[str, ...] = ()
    advertise: str | None = None
    register_token_file: str | None = None
    register_ca: str | None = None
    listen: dict[str, str] = field(default_factory=dict)
    listen_options: dict[str, dict[str, str]] = field(default_factory=dict)
    warm_up: bool = True

    def __post_init__(self) -> None:
        name = self.model_name
        if not name.strip() or len(name) > 256 or not name.isprintable():
            _fail("model_name", "must be a printable name of 1 to 256 characters", name)
        for key, host in (("host", self.host), ("http_host", self.http_host)):
            if host is not None and not _is_host(host):
                _fail(key, "must be a host name or address without a port", host)
        _check_range("port", self.port, 0, 65535)
        _check_range("http_port", self.http_port, 0, 65535)
        _check_range("workers", self.workers, 1, 256)
        _check_range("max_queue", self.max_queue, 0, 100_000)
        _check_range("max_message_bytes", self.max_message_bytes, 1024, MAX_MESSAGE_BYTES)
        _check_range("max_image_pixels", self.max_image_pixels, 1, 2**28)
        if not 0 < self.request_timeout_s <= HARD_TIMEOUT_S:
            _fail(
                "request_timeout_s", f"must be in (0, {HARD_TIMEOUT_S:g}]", self.request_timeout_s
            )
        if not (math.isfinite(self.grace_seconds) and self.grace_seconds >= 0):
            _fail("grace_seconds", "must be finite and >= 0", self.grace_seconds)
        self._check_registering()
        for protocol, address in self.listen.items():
            try:
                parse_endpoint(address, any_port=True)
            except ListenError as error:
                raise ValueError(
                    f"ServerOptions.listen.{protocol} must be an address: {error}"
                ) from error
        for protocol in self.listen_options:
            if protocol not in self.listen:
                _fail(f"listen_options.{protocol}", "must belong to a protocol of listen", protocol)

    def advertised(self) -> tuple[str, int | None]:
        """Return host and port by which gateways reach the server; port None = its own."""
        text = self.advertise or self.host
        if self.advertise is not None and not _is_host(text):
            host, port = parse_endpoint(text)
            return host, port
        return text.strip("[]"), None

    def _check_registering(self) -> None:
        key = "register_with"
        try:
            for address in self.register_with:
                parse_endpoint(address)
            key = "advertise"
            host, _ = self.advertised()
        except ListenError as error:
            raise ValueError(f"ServerOptions.{key} must hold an address: {error}") from error
        if self.register_with and host in ("0.0.0.0", "::"):
            _fail("advertise", "must be an address that gateways reach; host is every one", host)
        others = (self.advertise, self.register_token_file, self.register_ca)
        if not self.register_with and any(value is not None for value in others):
            _fail("register_with", "must be given with advertise and register_...", None)


@dataclass(frozen=True, slots=True)
class ObservationOptions:
    """How the fields of a request become an Observation.

    image_names: names clients use, in the checkpoint's camera order; () = the checkpoint's own.
    state_dim, action_dim: checked and cut to; 0 = the checkpoint's.  tokenizer_dir: as plugin
    argument ``tokenizer``.
    """

    image_names: tuple[str, ...] = ()
    state_dim: int = 0
    action_dim: int = 0
    tokenizer_dir: str | None = None
    default_prompt: str | None = None

    def __post_init__(self) -> None:
        if len(set(self.image_names)) != len(self.image_names) or not all(self.image_names):
            raise ValueError(f"image_names must be unique names; got {list(self.image_names)}.")
        for name in ("state_dim", "action_dim"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0; got {getattr(self, name)}.")


@dataclass(frozen=True, slots=True)
class TensorOptions:
    """A model's own request from named tensors: no action guard sees what comes out of it.

    request_type: ``module:Class`` that is called with the tensors by name; null = a dict of them.
    """

    request_type: str | None = None
    input_device: str = "cpu"
    output_name: str = "output"

    def __post_init__(self) -> None:
        if self.request_type is not None and not re.fullmatch(r"[\w.]+:\w+", self.request_type):
            raise ValueError(
                f"request_type must look like module:Class; got {self.request_type!r}."
            )
        if not self.output_name:
            raise ValueError("output_name must be a name; got none.")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """A whole file, checked. Paths in it are absolute."""

    path: Path
    args: EngineArgs
    deployment: DeploymentConfig | None
    server: ServerOptions
    adapter: ObservationOptions | TensorOptions


def load(
    path: str | Path, overrides: tuple[str, ...] = (), preset: str | None = None
) -> ServerConfig:
    """Return the checked contents of a server's file.

    overrides: ``key=value`` settings over it.  preset: of the plugin, whose arguments replace the
    file's of the same name; its files are made when need be.
    Raises: ConfigError with the dotted path; the plugin's arguments are imported for that, its
    weights aren't read.
    """
    from phyai.engine_builder import apply_overrides

    file = Path(path)
    data = apply_overrides(load_yaml_mapping(file), overrides)
    folder = file.parent
    if preset is not None:
        data = _with_preset(data, preset)
    if data.get("server") is None:
        raise ConfigError(
            "server must be given; got none. Write `server: {model_name: NAME}` into the file."
        )
    server = _server(data["server"], folder)
    adapter = _adapter(data.get("adapter"), folder)
    if isinstance(adapter, ObservationOptions) and adapter.tokenizer_dir is not None:
        data = _with_tokenizer(data, adapter.tokenizer_dir)
    args, deployment = engine_args_from_mapping(data, directory=folder, server=True)
    if isinstance(adapter, ObservationOptions):
        _check_actions(args.plugin)
    return ServerConfig(file, args, deployment, server, adapter)


def _server(section: object, folder: Path) -> ServerOptions:
    if isinstance(section, Mapping):
        section = dict(section)
        for key in ("token_file", "register_token_file", "register_ca"):
            if isinstance(section.get(key), str):
                section[key] = resolve_path(section[key], folder)
        if isinstance(tls := section.get("tls"), Mapping):
            section["tls"] = {
                key: resolve_path(value, folder) if isinstance(value, str) else value
                for key, value in tls.items()
            }
    return from_mapping(ServerOptions, section, "server")


def _adapter(section: object, folder: Path) -> ObservationOptions | TensorOptions:
    if section is None:
        return ObservationOptions()
    if not isinstance(section, Mapping):
        raise ConfigError(f"adapter must be a mapping; got {section!r}.")
    unknown = sorted(set(section) - {"factory", "args"})
    if unknown:
        raise ConfigError(f"adapter must have the keys factory and args; got {unknown[0]!r}.")
    factory = section.get("factory", "observations")
    kind = FACTORIES.get(factory) if isinstance(factory, str) else None
    if kind is None:
        raise ConfigError(
            f"adapter.factory must be one of {', '.join(FACTORIES)}; got {factory!r}. A server of "
            f"this version runs no other code between clients and the engine's action guards."
            f"{did_you_mean(str(factory), FACTORIES)}"
        )
    args = section.get("args") or {}
    if isinstance(args, Mapping):
        args = resolve_paths(args, folder, only=("tokenizer_dir",))
    found: type[Any] = ObservationOptions if kind == "observations" else TensorOptions
    options: ObservationOptions | TensorOptions = from_mapping(found, args, "adapter.args")
    return options


def _with_tokenizer(data: Mapping[str, Any], tokenizer: str) -> dict[str, Any]:
    given = data.get("plugin_args") or {}
    if not isinstance(given, Mapping):
        return dict(data)  # the engine's own check says what is wrong with it
    if given.get("tokenizer") is not None:
        raise ConfigError(
            "adapter.args.tokenizer_dir excludes plugin_args.tokenizer; got both. Give one."
        )
    return {**data, "plugin_args": {**given, "tokenizer": tokenizer}}


def _check_actions(plugin: str) -> None:
    """Raise ConfigError for a plugin that makes media alone; nothing of it moves a robot."""
    from phyai import plugins

    manifest = plugins.find(plugin).manifest
    if manifest is not None and manifest.media and "action_dim" not in manifest.capabilities:
        raise ConfigError(
            f"plugin must return actions to be served to robots; got {manifest.id!r}, which "
            "returns media alone. Serve another plugin; `phyai run` runs this one."
        )


def _with_preset(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    from phyai import plugins
    from phyai.cli.run_setup import build_preset, choose_preset

    given = data.get("plugin_args") or {}
    if not isinstance(given, Mapping) or not isinstance(data.get("plugin"), str):
        return dict(data)  # the engine's own check says what is wrong with it
    record = plugins.find(data["plugin"])
    assert record.manifest is not None
    built = build_preset(record, choose_preset(record.manifest, name))
    plain = {key: list(v) if isinstance(v, tuple) else v for key, v in built.items()}
    return {**data, "plugin_args": {**given, **plain}}


def _is_host(text: str) -> bool:
    if not text or text != text.strip() or "/" in text:
        return False
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in inner:
        import ipaddress

        try:
            return ipaddress.ip_address(inner).version == 6
        except ValueError:
            return False
    return inner == text


def _check_range(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        _fail(name, f"must be in [{least}, {most}]", value)


def _fail(name: str, rule: str, value: object) -> Any:
    raise ValueError(f"ServerOptions.{name} {rule}; got {value!r}.")
