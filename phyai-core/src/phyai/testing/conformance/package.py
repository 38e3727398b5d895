"""Level 0: what can be said of a package before any model of it runs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from phyai import plugins
from phyai.adapter import KNOWN_OPTIONS
from phyai.cli import run_setup
from phyai.errors import PluginError
from phyai.manifest import AdapterManifest
from phyai.plugin_rules import check_api
from phyai.testing.conformance.check import Failure, NotApplicable, checks_of
from phyai.testing.conformance.subject import Subject

_FRESH = """
import json, sys
from phyai import plugins

def says(record):
    return {"id": record.id, "dist": record.dist, "status": record.status, "error": record.error}

found = {"plugin": None, "error": "", "manifest": None}
try:
    record = plugins.find(sys.argv[1])
    found.update(plugin=says(record), manifest=json.loads(record.manifest.to_json()))
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
found["torch"] = "torch" in sys.modules
found["hooks"] = [says(plugins.load(record)) for record in plugins.discover_hooks()]
print(json.dumps(found))
"""


def can_be_selected(subject: Subject) -> None:
    """The plugin is found under its id and its manifest is the one that was given."""
    try:
        record = subject.record
    except PluginError as error:
        raise Failure(str(error)) from error
    given = subject.given.manifest
    if isinstance(given, AdapterManifest) and given != record.manifest:
        raise Failure(
            f"the installed manifest of {subject.plugin!r} must be the one under test; they "
            "differ. Install the package again, or give the plugin id instead."
        )


def entry_point_is_installed(subject: Subject) -> None:
    """A fresh interpreter finds the plugin by its entry point."""
    if not subject.installed:
        raise Failure(
            f"plugin {subject.plugin!r} must be offered by an installed distribution; got a class "
            "registered in this process, which workers and the command line cannot see. Add "
            f'[project.entry-points."phyai.plugins"] {subject.record.id} = "package.plugin" to '
            "pyproject.toml and install the package."
        )
    found = _fresh(subject)
    if found["error"]:
        raise Failure(f"a fresh interpreter must find the plugin; got {found['error']}")
    if found["plugin"]["dist"] != subject.record.dist:
        raise Failure(
            f"a fresh interpreter must find the plugin of {subject.record.dist!r}; got the one of "
            f"{found['plugin']['dist']!r}. Uninstall one of them, or select 'dist:id'."
        )


def manifest_imports_no_torch(subject: Subject) -> None:
    """The plugin module and its manifest are read without importing torch."""
    found = _fresh(subject)
    if found["torch"]:
        raise Failure(
            f"the plugin module of {subject.plugin!r} must not import torch, directly or through "
            f"another module; it did.{_because(found)} Import it inside functions, or in the "
            "module that 'target' names."
        )
    if found["error"]:
        raise NotApplicable(f"a fresh interpreter does not find the plugin: {found['error']}")


def hook_modules_import_no_torch(subject: Subject) -> None:
    """Hook plugins of the same distribution load, and import no torch: the CLI imports them."""
    hooks = [h for h in _fresh(subject)["hooks"] if h["dist"] == subject.record.dist]
    if not hooks:
        raise NotApplicable("the distribution offers no hook plugin (group phyai.hooks)")
    for hook in hooks:
        if hook["status"] not in ("ok", "blocked"):
            raise Failure(f"hook plugin {hook['id']!r} must load; got {hook['error']}")


def manifest_survives_json(subject: Subject) -> None:
    """The manifest is the same after JSON, and the same in every process."""
    manifest = subject.manifest
    if AdapterManifest.from_json(manifest.to_json()) != manifest:
        raise Failure(
            "the manifest must survive JSON unchanged; it did not. Use strings, finite numbers, "
            "lists, booleans and string keys in capabilities, and tuples elsewhere."
        )
    fresh = _fresh(subject)["manifest"]
    if fresh is not None and fresh != json.loads(manifest.to_json()):
        names = sorted(k for k, v in json.loads(manifest.to_json()).items() if fresh.get(k) != v)
        raise Failure(
            f"the manifest must be the same in every process; {', '.join(names)} differs. Return "
            "constants from phyai_adapter()."
        )


def api_version_fits(subject: Subject) -> None:
    """The manifest's API version is one this core can run."""
    wanted = subject.plugin.rpartition(":")[2]
    for record in map(plugins.load, plugins.discover()):
        if record.id == wanted and record.status == "incompatible":
            raise Failure(record.error)
    try:
        manifest = subject.manifest
    except PluginError as error:  # l0_can_be_selected says it
        raise NotApplicable("the plugin cannot be selected") from error
    check_api(manifest)


def adapter_class_keeps_the_contract(subject: Subject) -> None:
    """Target and args can be imported, the class has every method, arguments can be sent."""
    subject.record.load_class()
    subject.record.load_args()
    args = subject.args
    try:
        pickle.dumps(args)
    except Exception as error:
        raise Failure(
            f"arguments must survive pickle to reach worker processes; got {type(error).__name__}: "
            f"{error}. Use plain values, and module-level functions instead of lambdas."
        ) from error


def named_functions_exist(subject: Subject) -> None:
    """Every function the manifest names can be imported and called."""
    manifest = subject.manifest
    paths = {"golden": manifest.golden, "cost": manifest.cost}
    for preset in manifest.presets:
        paths[f"presets[{preset.name!r}].build"] = preset.build
        paths[f"presets[{preset.name!r}].sample"] = preset.sample
    for field, path in paths.items():
        if path and not callable(run_setup.load_function(path, subject.record)):
            raise Failure(f"manifest field {field} must name a function; got {path!r}.")


def capabilities_are_well_formed(subject: Subject) -> None:
    """Capabilities core and tools read have the type they read."""
    for name, value in subject.manifest.capabilities.items():
        rule = _RULES.get(name)
        if rule is not None and value is not None and not rule[1](value):
            raise Failure(f"capability {name!r} must be {rule[0]}; got {value!r}. Correct it.")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) and v for v in value)


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _precisions(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_texts(v) for v in value.values())


_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": ("a text", lambda v: isinstance(v, str) and bool(v)),
    "action_dim": ("a positive integer", _size),
    "horizon": ("a positive integer", _size),
    "control_hz": ("a positive number", lambda v: isinstance(v, int | float) and v > 0),
    "cameras": ("a list of names", _texts),
    "parallel": ("a list of axes", _texts),
    "options": (
        f"a list of options out of {', '.join(sorted(KNOWN_OPTIONS))}",
        lambda v: _texts(v) and set(v) <= set(KNOWN_OPTIONS),
    ),
    "own_options": (
        "a list of options that are not core's",
        lambda v: _texts(v) and not set(v) & set(KNOWN_OPTIONS),
    ),
    "files": ("a list of patterns of a checkpoint's files", _texts),
    "precisions": ("a mapping of names to lists of aliases", _precisions),
    "rtc": (
        "a list out of guided, ramp, trained",
        lambda v: _texts(v) and set(v) <= {"guided", "ramp", "trained"},
    ),
    "sessions": ("true or false", lambda v: isinstance(v, bool)),
}


def _fresh(subject: Subject) -> dict[str, Any]:
    """Return what a fresh interpreter says about the plugin; asked once."""
    found: dict[str, Any] = subject.once("fresh", lambda: _ask(subject.plugin))
    return found


def _ask(plugin: str) -> dict[str, Any]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, plugin],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Failure(
            f"a fresh interpreter must list plugins; it ended with code {done.returncode}: "
            f"{done.stderr.strip()[-800:]}"
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _because(found: Mapping[str, Any]) -> str:
    return f" {found['error']}" if found["error"] else ""


_ROOT = (can_be_selected, manifest_imports_no_torch, api_version_fits)
_REST = (
    entry_point_is_installed,
    hook_modules_import_no_torch,
    manifest_survives_json,
    adapter_class_keeps_the_contract,
    named_functions_exist,
    capabilities_are_well_formed,
)
CHECKS = (*checks_of(0, _ROOT), *checks_of(0, _REST, ("l0_can_be_selected",)))
