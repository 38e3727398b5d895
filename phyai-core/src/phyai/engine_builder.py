"""Engines from YAML: read a file, apply overrides, check every key, build.

Top-level keys: plugin, plugin_args, config, deployment, kernel_policy; a server's file adds
server and adapter. Relative paths are resolved against the file's folder. Torch-free on import.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.config_mapping import FieldInfo as FieldInfo
from phyai.config_mapping import check_keys, describe, from_mapping
from phyai.config_mapping import to_mapping as to_mapping
from phyai.config_yaml import apply_overrides as apply_overrides
from phyai.config_yaml import dump_yaml
from phyai.config_yaml import load_yaml_mapping as load_yaml_mapping
from phyai.deployment.config import DeploymentConfig
from phyai.engine_config import EngineConfig
from phyai.errors import ConfigError as ConfigError

if TYPE_CHECKING:
    from phyai.engine import Engine, EngineArgs

ENGINE_KEYS = ("plugin", "plugin_args", "config", "deployment", "kernel_policy")
SERVER_KEYS = ("server", "adapter")

# Always files or folders, so a relative one belongs to the YAML's folder.
_CONFIG_PATHS = (
    ("kernel", "config_path"),
    ("kernel", "autotune_cache"),
    ("runtime", "debug_tensor_dump_dir"),
)
# May also be hub ids, so only what looks like a path is resolved.
_CHECKPOINT_ARGS = ("checkpoint_dir", "checkpoint")


def build_engine(path: str | Path, overrides: Iterable[str] = ()) -> Engine:
    """Return an Engine built from a YAML file and ``key=value`` overrides.

    >>> engine = build_engine("pi.yaml", ["config.device.target=cpu"])  # doctest: +SKIP

    Raises: ConfigError, with the dotted path, before any weights are read.
    """
    file = Path(path)
    data = apply_overrides(load_yaml_mapping(file), overrides)
    args, deployment = engine_args_from_mapping(data, directory=file.parent)
    from phyai.engine import Engine

    return Engine(args, deployment=deployment)


def engine_args_from_mapping(
    data: Mapping[str, Any], *, directory: str | Path, server: bool = False
) -> tuple[EngineArgs, DeploymentConfig | None]:
    """Return the engine arguments and deployment that a YAML mapping describes.

    directory: folder that relative paths start from.  server: accept ``server`` and ``adapter``,
    which the caller reads.
    ``config`` is None when left out. With ``config`` but no ``config.device`` the other fields
    start from ``EngineConfig.auto()``, so that a file without a device runs on any machine.

    Raises: ConfigError with the dotted path of what is wrong.
    """
    folder = Path(directory)
    check_top_level(data, server=server)
    plugin = data.get("plugin")
    if type(plugin) is not str or not plugin.strip():
        raise ConfigError(
            f"plugin must be the id of an installed plugin; got {plugin!r}. See `phyai plugins`."
        )
    given_args = _section(data, "plugin_args")
    args_class = _args_class(plugin)
    if not dataclasses.is_dataclass(args_class):
        raise ConfigError(
            f"plugin_args of {plugin!r} must be described by a dataclass; got {args_class!r}."
        )
    plugin_args: Any = from_mapping(
        args_class, resolve_paths(given_args, folder, only=_CHECKPOINT_ARGS), "plugin_args"
    )
    config = config_from_mapping(data, directory=folder)
    deployment = None
    if data.get("deployment") is not None:
        deployment = from_mapping(DeploymentConfig, data["deployment"], "deployment")

    from phyai.engine import EngineArgs

    return EngineArgs(plugin=plugin, plugin_args=plugin_args, config=config), deployment


def check_top_level(data: object, *, server: bool = False) -> None:
    """Raise ConfigError unless ``data`` is a mapping with only known top-level keys."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"config file must hold a mapping; got {data!r}.")
    if not server:
        for key in SERVER_KEYS:
            if key in data:
                raise ConfigError(
                    f"{key} must be left out of an engine's file; got {data[key]!r}. "
                    "Start a server's file with `phyai serve`."
                )
    check_keys(data, ENGINE_KEYS + (SERVER_KEYS if server else ()), "")


def config_from_mapping(data: Mapping[str, Any], *, directory: str | Path) -> EngineConfig | None:
    """Return the EngineConfig of the keys ``config`` and ``kernel_policy``; None without them.

    Imports torch only when there is no ``config.device``.
    """
    section = _resolve_config_paths(_section(data, "config"), Path(directory))
    section = _with_policy(section, data.get("kernel_policy"), Path(directory))
    if not section:
        return None
    base = EngineConfig() if section.get("device") is not None else EngineConfig.auto()
    return from_mapping(EngineConfig, section, "config", base=base)


def schema() -> tuple[FieldInfo, ...]:
    """Return every ``config.*`` and ``deployment.*`` field with type, default, variable, help."""
    return describe(EngineConfig, "config") + describe(DeploymentConfig, "deployment")


def to_yaml(config: object) -> str:
    """Return a config (or a plain mapping) as YAML, dtypes by name; imports no torch."""
    return dump_yaml(config if isinstance(config, Mapping) else to_mapping(config))


def resolve_path(text: str, directory: Path) -> str:
    """Return ``text`` with ``~`` expanded, and relative to ``directory`` unless absolute."""
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"path must start with a known home; got {text!r}. {error}") from error
    # Not Path.resolve: links inside a checkpoint cache must stay links.
    return str(path) if path.is_absolute() else os.path.abspath(directory / path)


def resolve_paths(
    values: Mapping[str, Any], directory: Path, *, only: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return ``values`` with strings that look like paths resolved against ``directory``.

    Only ``.``, ``..`` and what starts with ``./``, ``../``, ``/`` or ``~`` looks like a path; a
    bare ``org/model`` stays a hub id.  only: the keys to look at; None = all.
    """
    wanted = set(values) if only is None else set(only)
    return {
        key: resolve_path(value, directory)
        if key in wanted and isinstance(value, str) and looks_like_path(value)
        else value
        for key, value in values.items()
    }


def looks_like_path(text: str) -> bool:
    """Return whether a string is written as a path rather than as a hub id."""
    return text in (".", "..") or text.startswith(("./", "../", "/", "~"))


def _section(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a top-level section; an empty one (``config:``) counts as left out."""
    value = data.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping; got {value!r}.")
    return dict(value)


def _resolve_config_paths(section: dict[str, Any], directory: Path) -> dict[str, Any]:
    for outer, name in _CONFIG_PATHS:
        inner = section.get(outer)
        if isinstance(inner, Mapping) and isinstance(inner.get(name), str) and inner[name]:
            section[outer] = {**inner, name: resolve_path(inner[name], directory)}
    return section


def _with_policy(section: dict[str, Any], policy: object, directory: Path) -> dict[str, Any]:
    """Write ``kernel_policy`` (a path or an inline mapping) into the kernel section."""
    if policy is None:
        return section
    kernel = section.get("kernel")
    kernel = {} if kernel is None else kernel
    if not isinstance(kernel, Mapping):
        raise ConfigError(f"config.kernel must be a mapping; got {kernel!r}.")
    for name in ("config_path", "policy_config"):
        if kernel.get(name) is not None:
            raise ConfigError(
                f"kernel_policy excludes config.kernel.{name}; got both. Give one of the two."
            )
    if isinstance(policy, str) and policy.strip():
        change: dict[str, Any] = {"config_path": resolve_path(policy, directory)}
    elif isinstance(policy, Mapping):
        change = {"policy_config": policy}
    else:
        raise ConfigError(f"kernel_policy must be a path or a mapping; got {policy!r}.")
    return {**section, "kernel": {**kernel, **change}}


def _args_class(plugin_id: str) -> type:
    """Return the dataclass of a plugin's arguments, importing the plugin that is asked for."""
    from phyai import plugins

    return plugins.find(plugin_id).load_args()
