"""What `phyai run` runs: plugin, preset or checkpoint, adapter arguments, engine configuration."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai import env, plugins
from phyai.cli.console import Waiting
from phyai.cli.options import RunOptions as RunOptions
from phyai.config_fields import DTYPE_NAMES
from phyai.config_mapping import convert, field_types, from_mapping
from phyai.config_yaml import apply_overrides
from phyai.engine_config import DeviceConfig, EngineConfig
from phyai.errors import CheckpointError, CheckpointNotFound, ConfigError, PluginError, did_you_mean
from phyai.manifest import AdapterManifest, Preset
from phyai.plugins import PluginRecord

if TYPE_CHECKING:
    from phyai.types import Observation

DEVICES = ("auto", "cpu", "cuda")
CONFIGS = ("*.json",)
"""What tells a checkpoint's plugin."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A plugin with everything an engine needs.

    plugin: what an engine finds it by, as chosen: ``dist:id`` tells packages of one id apart.
    sample: the preset's observation.
    """

    record: PluginRecord
    plugin: str
    manifest: AdapterManifest
    args: Any
    config: EngineConfig
    preset: Preset | None = None
    checkpoint: str | None = None
    precision: str | None = None
    sample: Observation | None = field(default=None, repr=False)


def prepare(options: RunOptions) -> Setup:
    """Return what the options mean; downloads the checkpoint or builds the preset.

    Raises: ConfigError, PluginError, CheckpointError; before any weights are read.
    """
    _check_exclusive(options)
    record, folder = choose_plugin(options)
    manifest = record.manifest
    assert manifest is not None
    precision, dtype = choose_precision(manifest, options.dtype)
    preset = None if options.checkpoint else choose_preset(manifest, options.preset)
    with Waiting("importing torch"):
        args_class = record.load_args()
    fields = {f.name for f in dataclasses.fields(args_class) if f.init}
    if preset is None and "checkpoint_dir" not in fields:
        raise ConfigError(f"plugin {record.id!r} takes no --checkpoint. Drop it.")
    given = _given_args(args_class, record.id, options, precision)
    built: Mapping[str, Any] = {}
    if preset is not None:
        built = build_preset(record, preset)
    else:
        assert options.checkpoint is not None
        folder = folder or _resolve(options, manifest.capabilities.get("files"))
        built = {"checkpoint_dir": str(folder)}
    merged = {**built, **given}
    args = _construct(args_class, merged, record.id)
    if precision is None and isinstance(getattr(args, "precision", None), str):
        precision, dtype = choose_precision(manifest, args.precision)
    sample = None
    if preset is not None and preset.sample:
        sample = load_function(preset.sample, record)(dict(merged))
    return Setup(
        record=record,
        plugin=record.qualified_id if ":" in (options.plugin or "") else record.id,
        manifest=manifest,
        args=args,
        config=engine_config(options.device, dtype, options.settings),
        preset=preset,
        checkpoint=options.checkpoint,
        precision=precision,
        sample=sample,
    )


def _check_exclusive(options: RunOptions) -> None:
    if options.checkpoint and options.preset:
        raise ConfigError(
            f"--checkpoint excludes --preset; got {options.checkpoint!r} and {options.preset!r}. "
            "Give one of the two."
        )
    if options.revision and not options.checkpoint:
        raise ConfigError(
            f"--revision belongs to --checkpoint ORG/NAME; got {options.revision!r} alone."
        )
    if options.device.partition(":")[0] not in DEVICES:
        raise ConfigError(
            f"--device must be auto, cpu, cuda or cuda:N; got {options.device!r}."
            + did_you_mean(options.device, DEVICES)
        )


# ---------------------------------------------------------------- plugin


def choose_plugin(options: RunOptions) -> tuple[PluginRecord, Path | None]:
    """Return the plugin, named or recognised by its checkpoint, and the resolved checkpoint."""
    if options.plugin is not None:
        return plugins.find(options.plugin), None
    if options.checkpoint is None:
        ids = ", ".join(plugins.registered()) or "none"
        raise ConfigError(f"--plugin or --checkpoint must be given; installed plugins: {ids}.")
    # Configs first: weights are large, and which of them are wanted is the plugin's to say.
    found = plugins.recognise(_config_alone(options), ())
    if len(found) == 1:
        return plugins.find(found[0]), None
    if found:
        raise _ambiguous(options.checkpoint, found)
    folder = _resolve(options)
    return plugins.find(_recognise(options.checkpoint, folder)), folder


def _config_alone(options: RunOptions) -> dict[str, Any]:
    """Return the checkpoint's config.json, empty where there is none; no weights are fetched."""
    try:
        return _config_of(_resolve(options, CONFIGS))
    except CheckpointNotFound:  # perhaps one without any JSON file
        return {}


def _resolve(options: RunOptions, files: Sequence[str] | None = None) -> Path:
    """Return the checkpoint's folder.  files: patterns of what is downloaded; None = the usual."""
    with Waiting("looking for the checkpoint"):
        from phyai import hub
    assert options.checkpoint is not None
    allow = files or hub.DEFAULT_ALLOW
    found = hub.resolve(options.checkpoint, revision=options.revision, allow=allow)
    if not found.is_dir():
        raise ConfigError(
            f"--checkpoint must be a folder or a hub id; got the file {str(found)!r}. "
            "Pass its folder."
        )
    return found


def _recognise(name: str, folder: Path) -> str:
    config = _config_of(folder)
    found = plugins.recognise(config, ())
    if len(found) != 1:
        with Waiting("reading tensor names"):
            from phyai.weights import tensor_index

            found = plugins.recognise(config, tensor_index(folder))
    if len(found) == 1:
        return found[0]
    if found:
        raise _ambiguous(name, found)
    ids = ", ".join(plugins.registered()) or "none"
    kind = config.get("type") or config.get("model_type")
    raise CheckpointError(
        f"checkpoint {name!r} must be one an installed plugin recognises; got "
        f"{f'type {kind!r}' if kind else 'an unknown one'}. Installed: {ids}. Name one with "
        "--plugin, or install its package."
    )


def _ambiguous(name: str, found: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"checkpoint {name!r} is recognised by {' and '.join(found)}. Choose with --plugin."
    )


def _config_of(folder: Path) -> dict[str, Any]:
    return _read_config(folder / "config.json")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"file {file} must be readable JSON; got {error}.") from error
    return data if isinstance(data, dict) else {}


# ---------------------------------------------------------------- preset


def choose_preset(manifest: AdapterManifest, name: str | None) -> Preset:
    """Return the preset of this name, or the first one."""
    names = [preset.name for preset in manifest.presets]
    if not names:
        raise ConfigError(f"plugin {manifest.id!r} has no preset. Pass --checkpoint DIR_OR_HUB_ID.")
    if name is None:
        return manifest.presets[0]
    if name not in names:
        raise ConfigError(
            f"--preset of {manifest.id!r} must be one of {', '.join(names)}; got {name!r}."
            + did_you_mean(name, names)
        )
    return manifest.presets[names.index(name)]


def build_preset(record: PluginRecord, preset: Preset) -> dict[str, Any]:
    """Return the adapter arguments of a preset, making its files in the cache if need be."""
    with Waiting("importing the preset"):
        build = load_function(preset.build, record)
    # What builds says so itself; files that are there are only looked at.
    with Waiting(f"checking preset {preset.name}") as progress:
        return dict(build(env.cache_dir(), progress))


def load_function(path: str, record: PluginRecord) -> Callable[..., Any]:
    """Return ``pkg.mod:func`` of a plugin; PluginError when it isn't there."""
    module, _, name = path.partition(":")
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"plugin {record.id!r} of {record.dist} {record.version} must offer {path!r}; "
            f"got {type(error).__name__}: {error}. Install it again."
        ) from error
    return function


# ---------------------------------------------------------------- adapter arguments


def _given_args(
    cls: type, plugin: str, options: RunOptions, precision: str | None
) -> dict[str, Any]:
    """Return the adapter arguments that options set, converted to the types of ``cls``."""
    types = field_types(cls)
    values: dict[str, Any] = {}
    for option, name, value in (
        ("--revision", "revision", options.revision),
        ("--tokenizer", "tokenizer", options.tokenizer),
    ):
        if value is None:
            continue
        if name in types:
            values[name] = value
        elif option == "--tokenizer":
            raise ConfigError(f"plugin {plugin!r} takes no {option}; got {value!r}. Drop it.")
    if precision is not None and "precision" in types:
        values["precision"] = precision
    for item in options.args:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--arg must look like key=value; got {item!r}.")
        if name not in types:
            raise ConfigError(
                f"--arg {name} must be an argument of plugin {plugin!r} "
                f"({', '.join(sorted(types))}); got {name!r}.{did_you_mean(name, types)}"
            )
        values[name] = _typed(types[name], name, text)
    return values


def _typed(kind: Any, name: str, text: str) -> Any:
    """Return the text as YAML of the field's type, or as it is where a string will do."""
    try:
        value = apply_overrides({}, [f"value={text}"])["value"]
        return convert(kind, value, f"--arg {name}")
    except ConfigError as error:
        try:
            return convert(kind, text, f"--arg {name}")
        except ConfigError:
            raise error from None


def _construct(cls: type, values: Mapping[str, Any], plugin: str) -> Any:
    try:
        return cls(**values)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"arguments of plugin {plugin!r} must fit; {error}.") from error


# ---------------------------------------------------------------- precision and engine


def choose_precision(manifest: AdapterManifest, name: str | None) -> tuple[str | None, str | None]:
    """Return the plugin's name of a precision and the engine dtype that goes with it."""
    if name is None:
        return None, None
    declared: Mapping[str, Sequence[str]] = manifest.capabilities.get("precisions") or {}
    if not declared:
        if name not in DTYPE_NAMES:
            raise _unknown_dtype(manifest.id, name, DTYPE_NAMES)
        return None, DTYPE_NAMES[name]
    for own, aliases in declared.items():
        if name == own or name in aliases:
            words = {own, *aliases}
            known = [DTYPE_NAMES[word] for word in sorted(words) if word in DTYPE_NAMES]
            return own, known[0] if known else "bfloat16"
    choices = [*declared, *(alias for aliases in declared.values() for alias in aliases)]
    raise _unknown_dtype(manifest.id, name, choices)


def _unknown_dtype(plugin: str, name: str, choices: Any) -> ConfigError:
    listed = ", ".join(sorted(choices))
    return ConfigError(
        f"--dtype of plugin {plugin!r} must be one of {listed}; got {name!r}."
        + did_you_mean(name, choices)
    )


def engine_config(device: str, dtype: str | None, settings: Sequence[str]) -> EngineConfig:
    """Return the settings of a device with the dtype and ``--set`` written over them."""
    config = EngineConfig.auto(None if device == "auto" else device)
    if dtype is not None:
        target = config.device.target
        config = config.replace(device=DeviceConfig(target=target, params_dtype=dtype))
    if not settings:
        return config
    changes = [item.removeprefix("config.") for item in settings]
    mapping = apply_overrides({}, changes)
    return from_mapping(EngineConfig, mapping, "config", base=config)
