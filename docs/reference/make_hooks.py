"""Writes hooks.md from the hook specs: python docs/reference/make_hooks.py [--check]."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

from phyai import hooks
from phyai.binding import FOUND_BEHIND, PART_ATTRIBUTES
from phyai.engine_core import RequestInfo
from phyai.plugin_rules import OBSERVER_HOOKS, ONE_PER_ADAPTER, PART_HOOKS, hook_arguments

PAGE = Path(__file__).with_name("hooks.md")
COMMAND = "python docs/reference/make_hooks.py"

HEAD = f"""# Hooks

<!-- Written by `{COMMAND}` from phyai.hooks. Do not edit. -->

A plugin is a module with functions marked `@hookimpl`. It declares the arguments it wants, by name,
and may leave the others out.

```python
from phyai.hooks import hookimpl


@hookimpl
def phyai_validate_action(chunk):
    return "too fast" if abs(chunk.actions).max() > 1.0 else None
```

List the module in `pyproject.toml`; it must not import torch at its top level:

```toml
[project.entry-points."phyai.hooks"]
speed_limit = "speed_limit.plugin"
```

`phyai new-hook NAME --hook HOOK` writes such a package. A module of group `phyai.plugins`, which
offers an adapter, may implement every hook but `phyai_commands`; they are active only while that
adapter is selected.

**Checks.** A hook that does not exist, an argument that does not exist, a function named like a
hook but not marked, and a hook module without any hook are refused by name, with the nearest name.
A hook plugin that cannot be loaded stops every engine with its traceback, because it may be the
safety filter; the command line works without it. `PHYAI_PLUGINS_BLOCK=NAME` (or `DIST:NAME`, comma
separated) denies it. `phyai plugins --json` lists status and traceback.

**Order.** `tryfirst`, then the rest, then `trylast`; by plugin name among equals. The first wrapper
is the outermost.

**Errors.** `sys.exit` counts as an exception everywhere. An exception of a part's own code while a
request runs fails that request as it is, with a note that names the hook plugin; the next request
works.
"""

KINDS = {
    "adapter": (
        "one per adapter module (group `phyai.plugins` only)",
        "when plugins are listed, and when this one is selected",
        "An exception, another type, another id or API version, or a manifest that JSON changes "
        "gives the plugin status `invalid` or `incompatible`. No other plugin is affected.",
    ),
    "part": (
        "part: a plain implementation replaces it, `@hookimpl(wrapper=True)` wraps it",
        "once, when an engine starts",
        "An exception stops the start with a PluginError that names plugin and hook. A "
        "PluginContractError is given for two plugins that replace one part, an object that is no "
        "such part, and a wrapper that does not yield once or returns None.",
    ),
    "validator": (
        "all implementations are asked",
        "for each row of every request of Observations, after the output",
        "Fail closed: an exception, a text or anything else than None raises ActionRejected, and "
        "the whole request is blocked. The engine goes on.",
    ),
    "kernels": (
        "all implementations add",
        "once, when an engine starts, before the adapter is built",
        "An exception stops the start with a PluginError; an object that is no KernelRow, with a "
        "PluginContractError. Names used twice and a second reference are a ConfigError.",
    ),
    "commands": (
        "all implementations add (group `phyai.hooks` only)",
        "when the command line starts and any hook plugin is installed",
        "The command line always starts: an exception, a name that is taken (core's own come "
        "first) and what cannot be made a command are told on stderr and left out.",
    ),
    "observer": (
        "all implementations are told",
        "at that moment, on the thread it happens on",
        "Isolated: an exception is logged once, counted in `engine.stats()` under "
        "`observer_failures`, and changes nothing else.",
    ),
}
"""Kind -> how implementations combine, when they are called, what errors do."""

ARGUMENTS = {
    "adapter": "the running adapter (`phyai.adapter.Adapter`), loaded",
    "services": "its services: graphs, kernels, memory, profile, device, dtype (`phyai.services`)",
    "stage": "`network` or `prediction`",
    "inner": "the denoiser before any plugin's; a wrapper takes what `yield` gives instead",
    "chunk": "the actions of one row in robot units",
    "info": "what happened, without content: "
    + ", ".join(f"`{field.name}`" for field in dataclasses.fields(RequestInfo)),
}
RETURNS = {
    "phyai_adapter": "the manifest: constants only, equal in every process",
    "phyai_validate_action": "None, or the reason as text",
    "phyai_kernels": "rows, or None",
    "phyai_commands": "functions or typer apps by command name, or None",
}


def render() -> str:
    """Return the page. Raises: KeyError for a hook or argument that nothing is written about."""
    rows = "\n".join(f"| [`{name}`](#{name}) | {_kind(name)} |" for name in hook_arguments())
    table = f"| hook | kind |\n|---|---|\n{rows}\n"
    return "\n".join([HEAD, table, *map(_section, hook_arguments())])


def _section(name: str) -> str:
    function = getattr(hooks, name)
    kind = _kind(name)
    combine, when, errors = KINDS[kind]
    if name == "phyai_denoiser":
        when = "stage `network`: once, when an engine starts; stage `prediction`: then, and per key"
    lines = [f"## {name}\n", f"```python\n{_signature(function)}\n```\n"]
    lines += [
        inspect.cleandoc(function.__doc__).replace("``", "`") + "\n",
        f"- **kind**: {combine}",
    ]
    lines += [f"- **called**: {when}"]
    lines += [f"- **{argument}**: {ARGUMENTS[argument]}" for argument in hook_arguments()[name]]
    if kind == "part":
        needs = ", ".join(f"`{attribute}`" for attribute in PART_ATTRIBUTES[name])
        lines.append(f"- **returns**: the part, which must have {needs}; plain: None = leave it")
        if method := FOUND_BEHIND.get(name):
            lines.append(
                f"- **must keep**: `{method}` of the wrapped part, in attribute `inner` or its own"
            )
    elif kind != "observer":
        lines.append(f"- **returns**: {RETURNS[name]}")
    lines.append(f"- **errors**: {errors}\n")
    return "\n".join(lines)


def _kind(name: str) -> str:
    if name in PART_HOOKS:
        return "part"
    if name in OBSERVER_HOOKS:
        return "observer"
    kinds = {ONE_PER_ADAPTER: "adapter", "phyai_validate_action": "validator"}
    return kinds.get(name, name.removeprefix("phyai_"))


def _signature(function: object) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    arguments = ", ".join(
        f"{p.name}: {p.annotation}" for p in signature.parameters.values()
    )  # annotations are texts: the module postpones them
    return f"def {function.__name__}({arguments}) -> {signature.return_annotation}"  # type: ignore[attr-defined]


def main(arguments: list[str]) -> int:
    text = render()
    if arguments == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE.name} must be what the hook specs say; it is not. Run {COMMAND}.")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
