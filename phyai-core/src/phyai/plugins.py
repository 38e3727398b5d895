"""Finding plugins: list without importing, load the selected one, explain what is broken.

Torch-free. Entry-point groups: ``phyai.plugins`` (one adapter each) and ``phyai.hooks``
(cross-cutting hooks). A broken adapter matters only when it is selected; a broken hook plugin
stops engine start, because it may be the safety filter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from phyai import hooks
from phyai.errors import PluginContractError, PluginError, PluginNotFound, did_you_mean
from phyai.manifest import AdapterManifest
from phyai.plugin_records import (
    BLOCK_ENV,
    IN_PROCESS,
    PluginRecord,
    Status,
    canonical_name,
    discover,
    discover_hooks,
    load,
    unmatched_names,
    unusable,
)
from phyai.plugin_rules import check_api, check_hooks, check_manifest

__all__ = [
    "DuplicatePluginError",
    "PluginRecord",
    "Status",
    "add_hooks",
    "create_manager",
    "discover",
    "discover_hooks",
    "find",
    "hook_commands",
    "inspect_all",
    "inspect_hooks",
    "load",
    "load_hook_plugins",
    "recognise",
    "register",
    "registered",
    "unmatched",
]

log = logging.getLogger("phyai")

_Class = TypeVar("_Class", bound=type)

_registered: dict[str, PluginRecord] = {}
_COMMAND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class DuplicatePluginError(PluginContractError, ValueError):
    """Another class is already registered under this id."""


# ---------------------------------------------------------------- selecting


def find(plugin_id: str, *, version: str | None = None) -> PluginRecord:
    """Return the plugin of this id, alias or ``dist:id``, its manifest loaded.

    version: the distribution version a parent process uses; another one is refused.
    Raises: PluginNotFound; PluginError when blocked, broken, ambiguous or of another version
    (chained from the plugin's own error).
    """
    record = load(_choose(plugin_id))
    if record.status != "ok":
        raise unusable(record)
    if version is not None and record.version != version:
        raise PluginError(
            f"Plugin {record.id!r} of {record.dist} must have version {version!r} here; got "
            f"{record.version!r}. Install the same version in every environment."
        )
    return record


def _choose(plugin_id: str) -> PluginRecord:
    dist, _, name = plugin_id.rpartition(":")
    records = [*_registered.values(), *discover()]
    pool = [r for r in records if not dist or canonical_name(r.dist) == canonical_name(dist)]
    known = _known()
    canonical = next((i for i, entry in known.items() if name in entry["aliases"]), name)
    found = [r for r in pool if r.id == name] or [r for r in pool if r.id == canonical]
    if not found and canonical not in known:
        loaded = [load(record) for record in pool]
        found = [r for r in loaded if r.manifest and name in r.manifest.aliases]
    if not found:
        raise _not_found(plugin_id, canonical, records)
    usable = [r for r in found if r.status != "blocked"] or found[:1]
    if len(usable) > 1:
        usable = _drop_own_copy(usable)
    if len(usable) > 1:
        raise PluginError(
            f"Plugin {plugin_id!r} is offered by "
            f"{' and '.join(f'{r.dist} {r.version}'.rstrip() for r in usable)}. "
            f"Choose {' or '.join(repr(r.qualified_id) for r in usable)}."
        )
    return usable[0]


def _drop_own_copy(records: list[PluginRecord]) -> list[PluginRecord]:
    """Drop a class registered here that is the very target of an installed plugin."""
    loaded = [load(r) for r in records if r.adapter_class is None]
    targets = {r.manifest.target for r in loaded if r.manifest}
    return [
        r
        for r in records
        if r.adapter_class is None or r.manifest is None or r.manifest.target not in targets
    ]


def _known() -> dict[str, Any]:
    path = Path(__file__).with_name("known_plugins.json")
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return known


def _not_found(plugin_id: str, canonical: str, records: Sequence[PluginRecord]) -> PluginNotFound:
    known = _known()
    ids = {r.id for r in records}
    installed = sorted({f"{r.id} (blocked)" if r.status == "blocked" else r.id for r in records})
    hint = ""
    if canonical in known and canonical not in ids:
        hint = f" Install it with `pip install {known[canonical]['install']}`."
    elif ":" in plugin_id:
        hint = did_you_mean(plugin_id, [r.qualified_id for r in records])
    elif guess := did_you_mean(canonical, {*ids, *known}):
        name = guess.split("'")[1]
        hint = guess
        if name not in ids:
            hint += f" Install it with `pip install {known[name]['install']}`."
    return PluginNotFound(
        f"Plugin {plugin_id!r} is not installed; installed: {', '.join(installed) or 'none'}.{hint}"
    )


def recognise(config: Mapping[str, Any], tensor_names: Iterable[str]) -> list[str]:
    """Return ids of plugins that recognise a checkpoint by its config or its tensor names.

    config: the checkpoint's config.json; ``type``, ``model_type`` and ``architectures`` are read.
    Matches by config come first, then matches by tensor name, each sorted. Blocked and broken
    plugins are left out.
    """
    named = config.get("architectures") or ()
    words = {named} if isinstance(named, str) else set(named)
    words |= {config[key] for key in ("type", "model_type") if isinstance(config.get(key), str)}
    names = list(tensor_names)
    by_config: set[str] = set()
    by_tensor: set[str] = set()
    for record in map(load, [*_registered.values(), *discover()]):
        if record.manifest is None:
            continue
        if words & set(record.manifest.architectures):
            by_config.add(record.id)
        elif any(name.endswith(record.manifest.key_probes) for name in names):
            by_tensor.add(record.id)
    return sorted(by_config) + sorted(by_tensor - by_config)


def inspect_all() -> list[dict[str, Any]]:
    """Return every adapter plugin, loaded in isolation, JSON-ready (``phyai plugins --json``).

    ``conflicts_with``: other distributions that offer the same id. Of several plugin modules that
    import torch, the first is reported until it is mended: afterwards torch is simply there.
    """
    records = [load(record) for record in [*discover(), *_registered.values()]]
    return [
        {
            **record.to_dict(),
            "conflicts_with": [
                other.dist
                for other in records
                if other.id == record.id and other is not record and other.status != "blocked"
            ],
        }
        for record in records
    ]


def inspect_hooks() -> list[dict[str, Any]]:
    """Return every hook plugin, loaded in isolation, JSON-ready."""
    return [load(record).to_dict() for record in discover_hooks()]


def registered() -> tuple[str, ...]:
    """Return the ids that can be selected: installed and not blocked, then registered here."""
    found = [record.id for record in discover() if record.status == "ok"]
    return tuple(dict.fromkeys([*found, *_registered]))


# ---------------------------------------------------------------- notebooks


def register(cls: _Class, manifest: AdapterManifest | None = None) -> _Class:
    """Register an adapter class of this process (inline engines only); usable as a decorator.

    Registering the same class again changes nothing.
    Raises: TypeError without ``name`` or ``args_cls``; PluginContractError for a taken id (also
    a ValueError) or a bad manifest.
    """
    if not isinstance(cls, type):
        raise TypeError(f"An adapter must be a class; got {cls!r}.")
    name, args_cls = getattr(cls, "name", None), getattr(cls, "args_cls", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{cls.__name__}.name must be a non-empty string; got {name!r}.")
    if not (isinstance(args_cls, type) and dataclasses.is_dataclass(args_cls)):
        raise TypeError(f"{cls.__name__}.args_cls must be a dataclass; got {args_cls!r}.")
    target = f"{cls.__module__}:{cls.__qualname__}"
    if manifest is None:
        summary = (cls.__doc__ or cls.__name__).strip().splitlines()[0]
        args = f"{args_cls.__module__}:{args_cls.__qualname__}"
        manifest = AdapterManifest(id=name, summary=summary, target=target, args=args)
    check_api(manifest)
    check_manifest(manifest, name, on_disk=False)
    old = _registered.get(name)
    if old is not None and old.adapter_class is not cls:
        raise DuplicatePluginError(
            f"Plugin id {name!r} is taken by {old.value}; got {target}. Give this class another "
            "name."
        )
    _registered[name] = PluginRecord(
        name, IN_PROCESS, "", target, manifest=manifest, adapter_class=cls
    )
    return cls


# ---------------------------------------------------------------- hook plugins


def create_manager() -> pluggy.PluginManager:
    """Return an empty manager that knows PhyAI's hooks."""
    manager = pluggy.PluginManager("phyai")
    manager.add_hookspecs(hooks)
    return manager


def add_hooks(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Check a hook module or object and register it under ``name``.

    Raises: PluginContractError for a broken rule or a taken name.
    """
    check_hooks(plugin, name, "hooks")
    if manager.has_plugin(name):
        raise PluginContractError(f"Hook plugin name {name!r} is taken. Choose another name.")
    manager.register(plugin, name=name)


def unmatched() -> list[str]:
    """Return a line per name in ``PHYAI_PLUGINS`` or ``PHYAI_PLUGINS_BLOCK`` that matches nothing.

    A misspelt name denies nothing, which its author should hear of.
    """
    records = [*discover(), *discover_hooks()]
    ids = {name for record in records for name in (record.id, record.qualified_id)}
    return [
        f"{variable} must hold ids of installed plugins; got {name!r}, which matches none."
        f"{did_you_mean(name, ids)}"
        for variable, names in unmatched_names().items()
        for name in names
    ]


def load_hook_plugins() -> pluggy.PluginManager:
    """Return a manager holding every hook plugin that is not blocked.

    Raises: PluginError with the traceback when one is broken: it may be the safety filter.
    """
    manager = create_manager()
    for line in unmatched():
        log.warning("%s", line)
    seen: dict[str, PluginRecord] = {}
    for record in map(load, discover_hooks()):
        if record.status == "blocked":
            continue
        if record.module is None:
            raise PluginError(
                f"Hook plugin {record.id!r} of {record.dist} {record.version} is broken "
                f"({record.status}): {record.error.rstrip('.')}. Repair it, or set "
                f"{BLOCK_ENV}={record.id} to run without it.\n\n{record.traceback}"
            ) from record.cause
        if (other := seen.get(record.id)) is not None:
            raise PluginError(
                f"Hook plugin {record.id!r} is offered by {other.dist} and {record.dist}. Set "
                f"{BLOCK_ENV} to {other.qualified_id!r} or {record.qualified_id!r}."
            )
        seen[record.id] = record
        add_hooks(manager, record.module, record.id)
    return manager


def hook_commands() -> tuple[dict[str, Callable[..., Any]], list[str]]:
    """Return CLI commands of all hook plugins, and a line for each one that is left out.

    Never raises for a broken plugin, so that the CLI starts. A name two plugins claim goes to
    the first one by plugin name.
    """
    commands: dict[str, Callable[..., Any]] = {}
    problems: list[str] = []
    for record in map(load, discover_hooks()):
        if record.status == "blocked":
            continue
        label = f"hook plugin {record.id!r} of {record.dist}"
        if record.module is None:
            problems.append(f"{label} is broken ({record.status}): {record.error}")
            continue
        manager = create_manager()
        try:
            manager.register(record.module, name=record.id)
            with contextlib.redirect_stdout(sys.stderr):
                offers = [dict(offer) for offer in manager.hook.phyai_commands()]
        except (Exception, SystemExit) as exc:
            problems.append(f"{label} failed in phyai_commands: {type(exc).__name__}: {exc}")
            continue
        for name, command in (item for offer in offers for item in offer.items()):
            if not isinstance(name, str) or not _COMMAND.fullmatch(name):
                problems.append(f"{label} offers command {name!r}, which is no name")
            elif name in commands:
                problems.append(f"{label} offers command {name!r}, which is taken")
            elif not callable(command):
                problems.append(f"{label} offers command {name!r}, which is not callable")
            else:
                commands[name] = command
    return commands, problems
