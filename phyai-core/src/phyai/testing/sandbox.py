"""Throw-away distributions on disk, seen by a fresh interpreter; imports no torch.

Broken plugins are tested as what they are: installed distributions with entry points. Nothing is
patched into this process, so what a test sees is what a user would.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from phyai import env as env_registry
from phyai import plugin_rules
from phyai.plugin_rules import ADAPTER_METHODS

TIMEOUT_S = 120.0

PLUGIN = """
from phyai.hooks import AdapterManifest, hookimpl

@hookimpl
def phyai_adapter():
    return AdapterManifest(id={id!r}, summary="A toy.", target={target!r}, args={args!r}{more})
"""
"""Source of a correct plugin module; ``more``: further arguments, from a comma on."""

MODEL = """
from dataclasses import dataclass

@dataclass
class Args:
    size: int = 1

class Model:
    args_cls = Args
    def __init__(self, args, config, services): pass
""" + "".join(f"    def {name}(self, *a): pass\n" for name in ADAPTER_METHODS)
"""Source of an adapter that can be selected, and runs nothing; imports no torch."""

_COMMAND_LINE = "import sys\nfrom phyai.cli.app import main\nsys.exit(main(sys.argv[1:]))\n"


class Sandbox:
    """A folder that distributions are installed into, and interpreters that see it.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from phyai.testing.sandbox import Sandbox
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sandbox = Sandbox(Path(folder) / "site")
    ...     sandbox.adapter("toy")
    ...     sandbox.ask("from phyai import plugins; result = plugins.registered()")
    ['toy']
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    # ------------------------------------------------------------ installing

    def distribution(
        self,
        name: str,
        modules: Mapping[str, str],
        entry_points: Mapping[str, Mapping[str, str]],
        *,
        version: str = "1.0",
    ) -> Path:
        """Install a distribution as an installer would; return its .dist-info.

        modules: dotted name -> source ("act.plugin" becomes act/plugin.py, parents are packages).
        entry_points: group -> {name: value}.
        """
        return make_distribution(self.folder, name, version, modules, entry_points)

    def adapter(
        self,
        plugin_id: str,
        code: str | None = None,
        *,
        dist: str | None = None,
        version: str = "1.0",
        more: str = "",
        model: str = MODEL,
    ) -> None:
        """Install distribution ``dist`` (default ``<id>-dist``) with one adapter plugin.

        code: source of the plugin module, default a correct one.  more: further arguments of its
        manifest, from a comma on.  model: source of the adapter's module.
        """
        dist = dist or f"{plugin_id}-dist"
        package = dist.replace("-", "_")
        code = plugin_source(plugin_id, package, more) if code is None else code
        self.distribution(
            dist,
            {f"{package}.plugin": code, f"{package}.model": model},
            {"phyai.plugins": {plugin_id: f"{package}.plugin"}},
            version=version,
        )

    def hooks(self, name: str, code: str, *, dist: str | None = None, version: str = "1.0") -> None:
        """Install distribution ``dist`` (default ``<name>-dist``) with one hook plugin."""
        dist = dist or f"{name}-dist"
        package = dist.replace("-", "_")
        self.distribution(
            dist,
            {f"{package}.hooks": code},
            {"phyai.hooks": {name: f"{package}.hooks"}},
            version=version,
        )

    # ------------------------------------------------------------ looking at it

    def python(
        self, code: str, *, isolated: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a fresh interpreter.

        isolated: it sees this folder, core and pluggy alone (no torch); else it sees this
        environment's packages besides.  env: variables; PHYAI_* ones of this process are dropped.
        """
        return run_python(self.folder, code, isolated=isolated, **env)

    def ask(self, code: str, *, isolated: bool = True, **env: str) -> Any:
        """Return the JSON-able variable ``result`` that ``code`` leaves in a fresh interpreter.

        Raises: AssertionError with its stderr when it fails.
        """
        done = self.python(
            f"{code}\nimport json\nprint(json.dumps(result))", isolated=isolated, **env
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def error_of(self, statement: str, *, isolated: bool = True, **env: str) -> Any:
        """Return type names, text and cause of the exception ``statement`` raises, None if none."""
        return self.ask(
            "result = None\nfrom phyai import plugins\n"
            f"try:\n    {statement}\n"
            "except Exception as exc:\n"
            "    result = {'types': [t.__name__ for t in type(exc).__mro__], 'text': str(exc),\n"
            "              'cause': type(exc.__cause__).__name__}\n",
            isolated=isolated,
            **env,
        )

    def cli(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command ``phyai`` in this environment with this folder besides."""
        return run_python(self.folder, _COMMAND_LINE, *arguments, isolated=False, **env)

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Let this process see the distributions; afterwards their modules are forgotten.

        Processes that it spawns inside see them too.
        """
        before, entry = set(sys.modules), str(self.folder)
        sys.path.insert(0, entry)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(entry)
            for name in sorted(set(sys.modules) - before):
                if self._holds(sys.modules[name]):
                    del sys.modules[name]
            importlib.invalidate_caches()

    def _holds(self, module: ModuleType | None) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and Path(file).is_relative_to(self.folder)


def plugin_source(plugin_id: str, package: str, more: str = "") -> str:
    """Return the source of a correct plugin module whose adapter is in ``<package>.model``."""
    return PLUGIN.format(
        id=plugin_id, target=f"{package}.model:Model", args=f"{package}.model:Args", more=more
    )


def make_distribution(
    folder: Path,
    name: str,
    version: str,
    modules: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
) -> Path:
    """Install a distribution into ``folder``; see ``Sandbox.distribution``."""
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


def run_python(
    folder: Path, code: str, *arguments: str, isolated: bool = True, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter; see ``Sandbox.python``."""
    path, flags = [str(folder)], ["-B"]
    if isolated:
        # Without site-packages (-S) plugins installed beside the tests cannot be seen.
        path += [str(Path(plugin_rules.__file__).parents[1]), str(_pluggy_alone(folder))]
        flags.append("-S")
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith((env_registry.PREFIX, "PYTHON"))
    }
    return subprocess.run(
        [sys.executable, *flags, "-c", code, *arguments],
        env={**inherited, "PYTHONPATH": os.pathsep.join(path), **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def _pluggy_alone(folder: Path) -> Path:
    """Return a folder beside ``folder`` that holds pluggy and nothing else."""
    needed = folder.parent / f"{folder.name}.needed"
    needed.mkdir(parents=True, exist_ok=True)
    link = needed / "pluggy"
    if not link.exists():
        link.symlink_to(Path(pluggy.__file__).parent, target_is_directory=True)
    return needed
