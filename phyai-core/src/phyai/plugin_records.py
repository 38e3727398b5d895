"""One installed plugin: list it without importing, load it in isolation, keep its error.

Layer 4, torch-free. Users import these names from ``phyai.plugins``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from phyai.errors import PluginContractError, PluginError, did_you_mean
from phyai.manifest import AdapterManifest
from phyai.plugin_rules import (
    ApiVersionError,
    check_adapter_class,
    check_hook_module,
    read_manifest,
)

ADAPTER_GROUP = "phyai.plugins"
HOOK_GROUP = "phyai.hooks"
ALLOW_ENV = "PHYAI_PLUGINS"
BLOCK_ENV = "PHYAI_PLUGINS_BLOCK"
IN_PROCESS = "in-process"

Status = Literal["ok", "blocked", "incompatible", "import-error", "invalid"]

_imports_torch: set[str] = set()


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One installed plugin.

    status ``ok`` with ``manifest`` None: not looked at yet.  dist: the distribution's name, or
    ``in-process``.  value: the plugin module's import path.

    >>> from phyai.plugins import discover
    >>> ids = [record.id for record in discover()]
    """

    id: str
    dist: str
    version: str
    value: str
    group: str = ADAPTER_GROUP
    status: Status = "ok"
    error: str = ""
    traceback: str = ""
    manifest: AdapterManifest | None = None
    module: ModuleType | None = field(default=None, repr=False, compare=False)
    cause: BaseException | None = field(default=None, repr=False, compare=False)
    adapter_class: type | None = field(default=None, repr=False, compare=False)

    @property
    def qualified_id(self) -> str:
        """Return ``dist:id``, which picks this plugin among duplicates."""
        return f"{self.dist}:{self.id}"

    def load_class(self) -> type:
        """Return the adapter class, importing its module (and torch).

        Raises: PluginError when the import fails; PluginContractError naming what is missing.
        """
        manifest = self._loaded()
        found = self.adapter_class or _import_object(manifest.target, self, "target")
        return check_adapter_class(found, self.id)

    def load_args(self) -> type:
        """Return the dataclass of the adapter's arguments.

        Raises: PluginError when the import fails; PluginContractError when it is no dataclass.
        """
        manifest = self._loaded()
        cls = self.adapter_class
        found = cls.args_cls if cls else _import_object(manifest.args, self, "args")  # type: ignore[attr-defined]
        if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
            raise PluginContractError(
                f"Manifest of plugin {self.id!r}: args must name a dataclass; got {found!r}."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return everything but live objects, JSON-ready."""
        names = ("id", "dist", "version", "group", "value", "status", "error", "traceback")
        manifest = json.loads(self.manifest.to_json()) if self.manifest else None
        return {**{name: getattr(self, name) for name in names}, "manifest": manifest}

    def _loaded(self) -> AdapterManifest:
        manifest = load(self).manifest
        if manifest is None:
            raise unusable(load(self))
        return manifest


# ---------------------------------------------------------------- listing, imports nothing


def discover() -> list[PluginRecord]:
    """Return all installed adapter plugins by id, importing none of them.

    A plugin outside ``PHYAI_PLUGINS`` or inside ``PHYAI_PLUGINS_BLOCK`` has status ``blocked``.
    Both hold comma-separated ids or ``dist:id``; an empty ``PHYAI_PLUGINS`` allows none.
    """
    records = _scan(ADAPTER_GROUP)
    if (allowed := _env_names(ALLOW_ENV)) is not None:
        shown = f"not in {ALLOW_ENV}={os.environ[ALLOW_ENV]!r}"
        records = [r if _named(r, allowed) else _block(r, shown) for r in records]
    return _apply_block_list(records)


def discover_hooks() -> list[PluginRecord]:
    """Return all installed hook plugins by name, importing none; the block list applies."""
    return _apply_block_list(_scan(HOOK_GROUP))


def unmatched_names() -> dict[str, list[str]]:
    """Return the names in the allow and the deny list that no installed plugin has, by variable.

    The allow list is of adapters; the deny list of adapters and hook plugins.

    >>> from phyai.plugin_records import unmatched_names
    >>> sorted(unmatched_names())
    []
    """
    adapters = _scan(ADAPTER_GROUP)
    pools = {ALLOW_ENV: adapters, BLOCK_ENV: [*adapters, *_scan(HOOK_GROUP)]}
    found = {
        variable: sorted(
            name for name in _env_names(variable) or () if not any(_named(r, {name}) for r in pool)
        )
        for variable, pool in pools.items()
    }
    return {variable: names for variable, names in found.items() if names}


def _scan(group: str) -> list[PluginRecord]:
    records: list[PluginRecord] = []
    seen: set[str] = set()
    folders: set[str] = set()
    for dist in importlib.metadata.distributions():
        # One without plugins shadows, too; reading the metadata of all would take too long.
        if (folder := _folder_name(dist)) in folders:
            continue
        folders.add(folder or f"unnamed {len(folders)}")
        # Read one distribution at a time: one with damaged metadata must not hide the others.
        try:
            text = dist.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError):
            continue
        if not text or group not in text:
            continue
        name, version = _identity(dist)
        if canonical_name(name) in seen:
            continue  # shadowed by an earlier folder of the import path
        seen.add(canonical_name(name))
        try:
            entries = list(dist.entry_points)
        except Exception as exc:
            broken = PluginRecord(name, name, version, "entry_points.txt", group)
            records.append(_failed(broken, "invalid", exc))
            continue
        records += [
            PluginRecord(entry.name, name, version, entry.value, group)
            for entry in entries
            if entry.group == group
        ]
    return sorted(records, key=lambda record: (record.id, record.dist))


def _folder_name(dist: importlib.metadata.Distribution) -> str | None:
    """Return the canonical name that the folder of the metadata is called by, None without one."""
    name = getattr(getattr(dist, "_path", None), "name", "")
    stem, _, suffix = name.rpartition(".")
    return canonical_name(stem.partition("-")[0]) if suffix in ("dist-info", "egg-info") else None


def _identity(dist: importlib.metadata.Distribution) -> tuple[str, str]:
    try:
        return dist.metadata["Name"] or "unknown", dist.version or "unknown"
    except Exception:  # METADATA absent or unreadable; the plugin may still work
        return "unknown", "unknown"


def canonical_name(name: str) -> str:
    """Return a distribution name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _env_names(variable: str) -> set[str] | None:
    text = os.environ.get(variable)
    return None if text is None else {n.strip() for n in text.split(",") if n.strip()}


def _named(record: PluginRecord, names: Iterable[str]) -> bool:
    for name in names:
        dist, _, plugin_id = name.rpartition(":")
        if plugin_id == record.id and (
            not dist or canonical_name(dist) == canonical_name(record.dist)
        ):
            return True
    return False


def _block(record: PluginRecord, why: str) -> PluginRecord:
    return dataclasses.replace(record, status="blocked", error=why, traceback="")


def _apply_block_list(records: list[PluginRecord]) -> list[PluginRecord]:
    denied = _env_names(BLOCK_ENV) or set()
    return [_block(r, f"named in {BLOCK_ENV}") if _named(r, denied) else r for r in records]


# ---------------------------------------------------------------- loading, one at a time


def load(record: PluginRecord) -> PluginRecord:
    """Return ``record`` with its manifest (or hooks) loaded, or with the reason it is broken.

    Imports that plugin's module alone and never raises for a broken plugin.
    """
    if record.status != "ok" or record.manifest is not None or record.module is not None:
        return record
    with contextlib.redirect_stdout(sys.stderr):  # a chatty plugin must not spoil --json
        return _load(record)


def _load(record: PluginRecord) -> PluginRecord:
    try:
        module = _import_module(record.value)
    except PluginContractError as exc:
        return _failed(record, "invalid", exc)
    except (Exception, SystemExit) as exc:
        return _failed(record, "import-error", exc)
    try:
        if record.group == HOOK_GROUP:
            check_hook_module(module, record.id)
            return dataclasses.replace(record, module=module)
        manifest = read_manifest(module, record.id)
    except ApiVersionError as exc:
        return _failed(record, "incompatible", exc)
    except (Exception, SystemExit) as exc:
        return _failed(record, "invalid", exc)
    return dataclasses.replace(record, module=module, manifest=manifest)


def _import_module(value: str) -> ModuleType:
    if not re.fullmatch(r"\w+(\.\w+)*", value):
        raise PluginContractError(
            f"A plugin's entry point must name a module; got {value!r}. Point it at a torch-free "
            "module with hook functions (an Entry class cannot be loaded)."
        )
    torch_was_there = "torch" in sys.modules
    module = importlib.import_module(value)
    if value in _imports_torch or ("torch" in sys.modules and not torch_was_there):
        _imports_torch.add(value)
        raise PluginContractError(
            f"Plugin module {value!r} must not import torch, directly or through another module. "
            "Import it inside functions, or in the module that 'target' names."
        )
    return module


def _import_object(path: str, record: PluginRecord, what: str) -> Any:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:
        raise PluginError(
            f"Plugin {record.id!r} of {record.dist} {record.version}: {what} {path!r} cannot be "
            f"imported: {type(exc).__name__}: {exc}"
        ) from exc
    if not hasattr(module, name):
        raise PluginContractError(
            f"Manifest of plugin {record.id!r}: {what} must name an object of module "
            f"{module_name!r}; got {name!r}.{did_you_mean(name, dir(module))}"
        )
    return getattr(module, name)


def _failed(record: PluginRecord, status: Status, exc: BaseException) -> PluginRecord:
    own = isinstance(exc, PluginContractError)
    text = "".join(traceback.format_exception(exc))
    error = str(exc) if own else f"{type(exc).__name__}: {exc}"
    return dataclasses.replace(record, status=status, error=error, traceback=text, cause=exc)


def unusable(record: PluginRecord) -> PluginError:
    """Return the error of selecting a plugin that is not ok, chained from its cause."""
    kind = PluginContractError if record.status in ("invalid", "incompatible") else PluginError
    remedy = f" Change {ALLOW_ENV} or {BLOCK_ENV} to use it." if record.status == "blocked" else ""
    error = kind(
        f"Plugin {record.id!r} of {record.dist} {record.version} cannot be used "
        f"({record.status}): {record.error.rstrip('.')}.{remedy}"
    )
    error.__cause__ = record.cause
    return error
