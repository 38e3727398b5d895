"""`phyai config`: the configuration an engine would get, as YAML. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.cli import console
from phyai.cli.options import DebugOption
from phyai.errors import ConfigError

NO_DEVICE = (
    "# Without config.device an engine takes CUDA when the machine has it, else the CPU\n"
    "# (device: {target: cpu, params_dtype: float32}); these are the defaults of CUDA.\n"
)


def config(
    items: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY=VALUE ...]",
            help="A YAML file, then settings such as config.device.target=cpu.",
            show_default=False,
        ),
    ] = None,
    fields: Annotated[
        bool, typer.Option("--fields", help="List every field: type, default, variable, meaning.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Also check plugin_args and that paths exist; imports the plugin."
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Print the resolved configuration of a YAML file, or of the defaults, as YAML.

    Order: defaults, the file, the settings given here, then PHYAI_* variables.
    """
    if fields:
        _print_fields()
        return
    file, settings = _split(items or [])
    from phyai import engine_builder

    data = engine_builder.load_yaml_mapping(file) if file else {}
    data = engine_builder.apply_overrides(data, settings)
    folder = file.parent if file else Path()
    engine_builder.check_top_level(data, server=True)
    if check:
        _check(data, folder, str(file or "defaults"))
        return
    resolved, chosen = _resolve(data, folder)
    print(("" if chosen else NO_DEVICE) + engine_builder.to_yaml(resolved), end="")


def _split(items: list[str]) -> tuple[Path | None, list[str]]:
    files = [item for item in items if "=" not in item]
    if items and "=" in items[0] and Path(items[0]).exists():
        files, items = [items[0]], items[1:]
    if len(files) > 1:
        raise ConfigError(
            f"config takes one FILE; got {', '.join(map(repr, files))}. "
            "Write settings as key=value."
        )
    return (Path(files[0]) if files else None), [item for item in items if item not in files]


def _resolve(data: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], bool]:
    """Return every top-level key with all its defaults, and whether a device was chosen."""
    from phyai import env
    from phyai.config_mapping import from_mapping, to_mapping
    from phyai.deployment import DeploymentConfig
    from phyai.engine_builder import config_from_mapping
    from phyai.engine_config import EngineConfig

    section = data.get("config") or {}
    given = isinstance(section, Mapping) and section.get("device") is not None
    wanted = dict(data)
    if not given and (section or data.get("kernel_policy") is not None):
        # An engine asks torch what this machine has; here nothing may import torch.
        if not isinstance(section, Mapping):
            raise ConfigError(f"config must be a mapping; got {section!r}.")
        wanted["config"] = {**section, "device": {}}
    base = config_from_mapping(wanted, directory=folder) or EngineConfig()
    final = env.override(base, explicit=bool(data))
    target = any(var.field == "device.target" for var in env.settings())
    resolved: dict[str, Any] = {
        key: data[key] for key in ("plugin", "plugin_args", "server", "adapter") if key in data
    }
    resolved["config"] = to_mapping(final, "config")
    if data.get("deployment") is not None:
        deployment = from_mapping(DeploymentConfig, data["deployment"], "deployment")
        resolved["deployment"] = to_mapping(deployment, "deployment")
    return resolved, given or target


def _check(data: Mapping[str, Any], folder: Path, name: str) -> None:
    from phyai.engine_builder import config_from_mapping, engine_args_from_mapping, looks_like_path

    if "plugin" in data:
        args, _ = engine_args_from_mapping(data, directory=folder, server=True)
        config, plugin_args = args.config, args.plugin_args
        for key in ("checkpoint_dir", "checkpoint", "tokenizer"):
            value = getattr(plugin_args, key, None)
            if isinstance(value, (str, os.PathLike)) and looks_like_path(str(value)):
                _must_exist(f"plugin_args.{key}", str(value))
    else:
        _resolve(data, folder)
        config = config_from_mapping(data, directory=folder)
    if config is not None and config.kernel.config_path is not None:
        _must_exist("config.kernel.config_path", config.kernel.config_path)
    if config is not None and (config.kernel.config_path or config.kernel.policy_config):
        from phyai.kernel_setup import apply_policy, installed_table

        apply_policy(installed_table(data.get("plugin")), config)
    print(f"Configuration valid: {name}")


def _must_exist(key: str, path: str) -> None:
    if not Path(path).expanduser().exists():
        raise ConfigError(f"{key} must exist; got no {path!r}. Correct the path.")


def _print_fields() -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from phyai.engine_builder import schema

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("field", "type", "default", "variable", "meaning"):
        table.add_column(column, overflow="fold")
    for row in schema():
        default = "null" if row.default is None else str(row.default).lower() \
            if isinstance(row.default, bool) else str(row.default)  # fmt: skip
        table.add_row(*map(Text, (row.path, row.type, default, row.env, row.help)))
    screen = console.console()
    if not screen.is_terminal:
        screen.width = 200  # a pipe has no width; keep a field on one line
    screen.print(table)
