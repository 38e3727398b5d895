"""The rules a plugin must keep: its hooks, its manifest, its adapter class.

Layer 4, imports no torch. Every broken rule is a PluginContractError that names plugin and rule.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pluggy

from phyai import hooks
from phyai.errors import PluginContractError, did_you_mean
from phyai.manifest import ADAPTER_API, AdapterManifest, Preset

Owner = Literal["adapter", "hooks"]

ONE_PER_ADAPTER = "phyai_adapter"
PART_HOOKS = (
    "phyai_conditioning",
    "phyai_cache",
    "phyai_solver",
    "phyai_rollout_solver",
    "phyai_output",
    "phyai_denoiser",
)
OBSERVER_HOOKS = (
    "phyai_engine_ready",
    "phyai_request_started",
    "phyai_request_finished",
    "phyai_engine_closing",
)
ADAPTER_METHODS = (
    "load",
    "prepare",
    "start",
    "denoiser",
    "conditioning",
    "cache",
    "solver",
    "rollout_solver",
    "output",
    "update_weights",
    "refresh",
    "dump_targets",
    "expects",
    "close",
)

ADAPTER_DUTIES = ("prepare", "denoiser")
"""Methods of the Adapter base class that have no default."""

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_OBJECT = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


_PARSER = pluggy.PluginManager("phyai")
_MISSPELT = 0.9
"""Similarity from which an unmarked function is taken for a hook: two letters of a short name."""


class ApiVersionError(PluginContractError):
    """The plugin was written for another version of the adapter contract."""


@functools.cache
def hook_arguments() -> Mapping[str, tuple[str, ...]]:
    """Return every hook's name and its arguments in order."""
    return {
        name: tuple(inspect.signature(function).parameters)
        for name, function in vars(hooks).items()
        if hasattr(function, "phyai_spec")
    }


# ---------------------------------------------------------------- hooks


def check_hooks(plugin: object, name: str, owner: Owner) -> None:
    """Check every hook implementation of a plugin module (or object) against the specs.

    owner: ``adapter`` for group ``phyai.plugins``, ``hooks`` for group ``phyai.hooks``.
    Raises: PluginContractError naming the hook, the argument and the nearest valid name.
    """
    specs = hook_arguments()
    for attribute in dir(plugin):
        function = getattr(plugin, attribute, None) if attribute.startswith("phyai_") else None
        options = _PARSER.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            own = getattr(function, "__module__", None) == getattr(plugin, "__name__", "")
            if own and inspect.isfunction(function):
                _check_unmarked(attribute, name, specs)
            continue
        hook = options["specname"] or attribute
        if hook not in specs:
            if options["optionalhook"]:
                continue
            raise PluginContractError(
                f"Hook {hook!r} of plugin {name!r} does not exist."
                f"{did_you_mean(hook, specs)} Valid hooks: {', '.join(sorted(specs))}."
            )
        _check_owner(hook, name, owner)
        implementation = function if function is not None else getattr(plugin, attribute)
        _check_wrapper(hook, name, implementation, dict(options))
        _check_arguments(hook, name, implementation)


def check_hook_module(module: object, name: str) -> None:
    """Check a module of group ``phyai.hooks``; one without any hook may be a lost safety filter.

    Raises: PluginContractError naming the rule.
    """
    check_hooks(module, name, "hooks")
    if not any(_PARSER.parse_hookimpl_opts(module, attribute) for attribute in dir(module)):
        raise PluginContractError(
            f"Hook plugin {name!r} must implement a hook; its module "
            f"{getattr(module, '__name__', module)!r} has none. Mark a function with @hookimpl "
            "(from phyai.hooks), or point the entry point at the module that has it."
        )


def _check_unmarked(attribute: str, name: str, specs: Mapping[str, object]) -> None:
    """Refuse a function that is meant to be a hook, by its name, but is not marked as one."""
    close = difflib.get_close_matches(attribute, specs, n=1, cutoff=_MISSPELT)
    if not close:
        return
    spelling = "" if attribute in specs else f" Did you mean {close[0]!r}?"
    raise PluginContractError(
        f"Function {attribute!r} of plugin {name!r} is not marked as a hook.{spelling} "
        "Put @hookimpl (from phyai.hooks) above it."
    )


def _check_owner(hook: str, name: str, owner: Owner) -> None:
    if owner == "hooks" and hook == ONE_PER_ADAPTER:
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} is never called in group phyai.hooks. "
            "List the module in entry-point group phyai.plugins."
        )
    if owner == "adapter" and hook == "phyai_commands":
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} is never called in group phyai.plugins. "
            "Move it to a module listed in entry-point group phyai.hooks."
        )


def _check_wrapper(
    hook: str, name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> None:
    generator = inspect.isgeneratorfunction(inspect.unwrap(function))
    if options["hookwrapper"]:
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} must use the new wrapper style; got "
            "hookwrapper=True. Write @hookimpl(wrapper=True) and return the wrapped object."
        )
    if options["wrapper"] and hook not in PART_HOOKS:
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} cannot be wrapped; got wrapper=True. "
            f"Only {', '.join(PART_HOOKS)} can."
        )
    if options["wrapper"] and not generator:
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} is a wrapper and must yield once; got a plain "
            "function. Write `inner = yield` and return the wrapped object."
        )
    if generator and not options["wrapper"]:
        raise PluginContractError(
            f"Hook {hook!r} of plugin {name!r} yields but is not marked as a wrapper. "
            "Write @hookimpl(wrapper=True)."
        )


def _check_arguments(hook: str, name: str, function: Callable[..., Any]) -> None:
    valid = hook_arguments()[hook]
    listed = f"Valid arguments: {', '.join(valid)}." if valid else "It takes no arguments."
    for parameter in inspect.signature(function).parameters.values():
        shown = str(parameter.replace(annotation=parameter.empty))
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise PluginContractError(
                f"Hook {hook!r} of plugin {name!r} must declare plain named arguments; got "
                f"{shown!r}. {listed}"
            )
        if parameter.name not in valid:
            raise PluginContractError(
                f"Hook {hook!r} of plugin {name!r} has no argument {parameter.name!r}."
                f"{did_you_mean(parameter.name, valid)} {listed}"
            )


# ---------------------------------------------------------------- manifest


def read_manifest(module: object, plugin_id: str) -> AdapterManifest:
    """Return the checked manifest of a plugin module.

    Raises: ApiVersionError for another API version; PluginContractError for any other broken rule.
    """
    adapter = getattr(module, ONE_PER_ADAPTER, None)
    if not hasattr(adapter, "phyai_impl"):
        check_hooks(module, plugin_id, "adapter")  # names a misspelt or unmarked hook
        raise PluginContractError(
            f"Plugin {plugin_id!r} must implement phyai_adapter() in module "
            f"{getattr(module, '__name__', module)!r}. Add it with @hookimpl; it returns an "
            "AdapterManifest."
        )
    assert callable(adapter)
    _check_arguments(ONE_PER_ADAPTER, plugin_id, adapter)
    manifest = _call_adapter(adapter, plugin_id)
    if not isinstance(manifest, AdapterManifest):
        raise PluginContractError(
            f"phyai_adapter() of plugin {plugin_id!r} must return an AdapterManifest; got "
            f"{type(manifest).__name__}."
        )
    check_api(manifest)
    check_hooks(module, plugin_id, "adapter")
    check_manifest(manifest, plugin_id)
    return manifest


def _call_adapter(adapter: Callable[[], object], plugin_id: str) -> object:
    try:
        return adapter()
    except TypeError as exc:
        found = re.search(
            r"AdapterManifest\.__init__\(\) got an unexpected keyword.*'(\w+)'", str(exc)
        )
        if found is None:
            raise
        fields = [field.name for field in dataclasses.fields(AdapterManifest)]
        raise PluginContractError(
            f"Manifest of plugin {plugin_id!r} has no field {found[1]!r} in adapter API "
            f"{'.'.join(map(str, ADAPTER_API))}.{did_you_mean(found[1], fields)} Rename it, or "
            "upgrade phyai-core if the plugin was written for a newer one."
        ) from exc


def check_api(manifest: AdapterManifest, core: tuple[int, int] = ADAPTER_API) -> None:
    """Check that core can run an adapter of this API version: equal majors, minor <= core's.

    Raises: ApiVersionError telling which side to upgrade.
    """
    api = manifest.api
    pair = isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)
    if not pair or min(api) < 0:
        raise _broken(manifest.id, "api", "be two integers (major, minor)", api)
    wanted, have = (".".join(str(part) for part in version) for version in (api, core))
    if api[0] == core[0] and api[1] <= core[1]:
        return
    remedy = "Upgrade phyai-core." if api > core else "Upgrade the plugin."
    raise ApiVersionError(
        f"Plugin {manifest.id!r} needs adapter API {wanted}, this phyai-core has {have}. {remedy}"
    )


def check_manifest(manifest: AdapterManifest, plugin_id: str, *, on_disk: bool = True) -> None:
    """Check every rule of a manifest.

    on_disk: False for a class registered in this process, which may have no importable name.
    Raises: PluginContractError naming the field and the rule.
    """
    if manifest.id != plugin_id:
        raise _broken(plugin_id, "id", f"equal the plugin's name {plugin_id!r}", manifest.id)
    if not _ID.fullmatch(manifest.id):
        raise _broken(plugin_id, "id", "hold letters, digits, '_', '.' and '-' only", manifest.id)
    if not isinstance(manifest.summary, str) or not manifest.summary.strip():
        raise _broken(plugin_id, "summary", "say in one line what the adapter runs", "nothing")
    for name in ("architectures", "key_probes", "aliases"):
        value = getattr(manifest, name)
        texts = isinstance(value, tuple) and all(isinstance(v, str) and v for v in value)
        if not texts:
            raise _broken(plugin_id, name, "be a tuple of non-empty strings", value)
    presets = manifest.presets
    if not isinstance(presets, tuple) or not all(isinstance(p, Preset) for p in presets):
        raise _broken(plugin_id, "presets", "be a tuple of Preset", presets)
    names = [preset.name for preset in presets]
    if not all(isinstance(n, str) and n for n in names) or len(set(names)) < len(names):
        raise _broken(plugin_id, "presets", "have different, non-empty names", names)
    if not isinstance(manifest.weights_licence, str):
        raise _broken(plugin_id, "weights_licence", "be a string", manifest.weights_licence)
    objects = {"target": manifest.target, "args": manifest.args} if on_disk else {}
    for name in ("golden", "cost", "media"):
        if value := getattr(manifest, name):
            objects[name] = value
    for preset in presets:
        objects[f"presets[{preset.name!r}].build"] = preset.build
        if preset.sample:
            objects[f"presets[{preset.name!r}].sample"] = preset.sample
    for name, value in objects.items():
        if not isinstance(value, str) or not _OBJECT.fullmatch(value):
            raise _broken(plugin_id, name, "look like 'package.module:Name'", value)
    _check_json(manifest, plugin_id)


def _check_json(manifest: AdapterManifest, plugin_id: str) -> None:
    rule = "survive JSON unchanged (string keys, lists, strings, finite numbers, booleans, null)"
    try:
        capabilities = dict(manifest.capabilities)
        text = json.dumps(capabilities, allow_nan=False)
        same = json.loads(text) == capabilities
        same = same and AdapterManifest.from_json(manifest.to_json()) == manifest
    except (TypeError, ValueError) as exc:
        message = _broken(plugin_id, "capabilities", rule, manifest.capabilities)
        raise message from exc
    if not same:
        raise _broken(plugin_id, "capabilities", rule, manifest.capabilities)


def _broken(plugin_id: str, field: str, rule: str, value: object) -> PluginContractError:
    return PluginContractError(
        f"Manifest of plugin {plugin_id!r}: {field} must {rule}; got {value!r}."
    )


# ---------------------------------------------------------------- adapter class


def check_adapter_class(cls: object, plugin_id: str) -> type:
    """Return ``cls`` when it quacks like an Adapter.

    Raises: PluginContractError naming everything that is missing.
    """
    if not isinstance(cls, type):
        raise PluginContractError(
            f"Adapter of plugin {plugin_id!r} must be a class; got {type(cls).__name__}."
        )
    label = f"Adapter {cls.__name__!r} of plugin {plugin_id!r}"
    if not hasattr(cls, "denoiser") and hasattr(cls, "setup") and hasattr(cls, "step"):
        raise PluginContractError(
            f"{label} is an Entry (setup and step), which this runtime cannot run. "
            "Subclass phyai.adapter.Adapter instead."
        )
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    missing = [
        name
        for name in ADAPTER_METHODS
        if name in abstract or not callable(getattr(cls, name, None)) or _not_overridden(cls, name)
    ]
    missing += sorted(set(abstract) - set(missing))
    if missing:
        raise PluginContractError(
            f"{label} lacks {', '.join(f'{name}()' for name in missing)}. Subclass "
            "phyai.adapter.Adapter and implement what has no default."
        )
    try:
        inspect.signature(cls).bind("args", "config", "services")
    except (TypeError, ValueError) as exc:
        raise PluginContractError(
            f"{label} must be constructed as {cls.__name__}(args, config, services); got {exc}."
        ) from exc
    name = getattr(cls, "name", "") or plugin_id
    if name != plugin_id:
        raise PluginContractError(
            f"{label}: name must equal the plugin id; got {name!r}. Rename one of them."
        )
    return cls


def _not_overridden(cls: type, method: str) -> bool:
    # A subclass of the base has already imported its module (and torch); nobody else needs to.
    base = getattr(sys.modules.get("phyai.adapter"), "Adapter", None)
    if method not in ADAPTER_DUTIES or base is None:
        return False
    return getattr(cls, method, None) is getattr(base, method)
