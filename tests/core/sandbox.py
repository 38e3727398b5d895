"""Throw-away distributions on disk, seen by a fresh interpreter that sees nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy

import phyai
from phyai.plugin_rules import ADAPTER_METHODS


def make_distribution(
    folder: Path,
    name: str,
    version: str,
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
) -> Path:
    """Install a distribution into ``folder`` as an installer would; return its .dist-info.

    modules: dotted name -> source ("act.plugin" becomes act/plugin.py, parents are packages).
    entry_points: group -> {name: value}.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for dotted, source in modules.items():
        path = folder.joinpath(*dotted.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents:
            if parent != Path():
                (folder / parent / "__init__.py").touch()
        path.write_text(source, encoding="utf-8")
        files.append(str(path.relative_to(folder)))
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return info


def run_python(folder: Path, code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in an interpreter whose only distributions are those of ``folder``.

    Without site-packages (-S) plugins installed beside the tests cannot be seen; core's source
    and pluggy are put on the path by hand.
    """
    needed = folder.parent / f"{folder.name}.needed"
    needed.mkdir(parents=True, exist_ok=True)
    link = needed / "pluggy"
    if not link.exists():
        link.symlink_to(Path(pluggy.__file__).parent, target_is_directory=True)
    core = Path(phyai.__file__).parents[1]
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PHYAI_", "PYTHON"))}
    path = os.pathsep.join(str(entry) for entry in (folder, core, needed))
    return subprocess.run(
        [sys.executable, "-S", "-B", "-c", code],
        env={**inherited, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def ask(folder: Path, code: str, **env: str) -> Any:
    """Return the JSON-able variable ``result`` that ``code`` leaves in a fresh interpreter."""
    done = run_python(folder, f"{code}\nimport json\nprint(json.dumps(result))", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def error_of(folder: Path, statement: str, **env: str) -> dict[str, Any]:
    """Return type names, message and cause of the exception that ``statement`` raises."""
    return ask(
        folder,
        "result = None\nfrom phyai import plugins\n"
        f"try:\n    {statement}\n"
        "except Exception as exc:\n"
        "    result = {'types': [t.__name__ for t in type(exc).__mro__], 'text': str(exc),\n"
        "              'cause': type(exc.__cause__).__name__}\n",
        **env,
    )


# ---------------------------------------------------------------- toy plugins

STATUS = """
from phyai import plugins
rows = plugins.inspect_all()
result = {row["id"]: [row["status"], row["error"]] for row in rows}
"""

DUE = "from phyai.hooks import hookimpl\n"

PLUGIN = """
from phyai.hooks import AdapterManifest, hookimpl

@hookimpl
def phyai_adapter():
    return AdapterManifest(id={id!r}, summary="A toy.", target={target!r}, args={args!r}{more})
"""

MODEL = """
from dataclasses import dataclass

@dataclass
class Args:
    size: int = 1

class Model:
    args_cls = Args
    def __init__(self, args, config, services): pass
""" + "".join(f"    def {name}(self, *a): pass\n" for name in ADAPTER_METHODS)


def source(plugin_id: str, package: str, more: str = "") -> str:
    return PLUGIN.format(
        id=plugin_id, target=f"{package}.model:Model", args=f"{package}.model:Args", more=more
    )


def install(
    folder: Path,
    plugin_id: str,
    code: str | None = None,
    *,
    dist: str | None = None,
    version: str = "1.0",
    more: str = "",
    model: str = MODEL,
) -> None:
    """Install distribution ``dist`` (default ``<id>-dist``) with one adapter plugin."""
    dist = dist or f"{plugin_id}-dist"
    package = dist.replace("-", "_")
    code = source(plugin_id, package, more) if code is None else code
    make_distribution(
        folder,
        dist,
        version,
        {f"{package}.plugin": code, f"{package}.model": model},
        {"phyai.plugins": {plugin_id: f"{package}.plugin"}},
    )


def install_hooks(folder: Path, name: str, code: str, *, dist: str | None = None) -> None:
    dist = dist or f"{name}-dist"
    package = dist.replace("-", "_")
    make_distribution(
        folder, dist, "1.0", {f"{package}.hooks": code}, {"phyai.hooks": {name: f"{package}.hooks"}}
    )
