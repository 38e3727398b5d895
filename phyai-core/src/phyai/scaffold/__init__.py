"""Writes new plugin packages from templates; the text of `phyai new-adapter` and `new-hook`.

Templates are package data below ``templates``: a file ``name.tmpl`` becomes ``name``, a leading
``dot-`` a dot. In paths and texts ``@@word@@`` is replaced.
"""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from phyai import plugins
from phyai.errors import ConfigError, did_you_mean
from phyai.plugin_rules import OBSERVER_HOOKS, PART_HOOKS

KINDS = {"vla": "flow matching over camera, state and prompt",
         "tracker": "one call from camera, prompt and session to waypoints"}  # fmt: skip
HOOKS = (*PART_HOOKS, "phyai_validate_action", "phyai_kernels", "phyai_commands", *OBSERVER_HOOKS)
MAX_NAME = 32
_NETWORKS = {"vla": "FlowDenoiser", "tracker": "Tracker"}
_SHARED_TEMPLATES = {
    "phyai_rollout_solver": "phyai_solver",
    **dict.fromkeys(OBSERVER_HOOKS, "observer"),
}


@dataclass(frozen=True, slots=True)
class Name:
    """The names of a new package: plugin id and module, distribution, class prefix.

    >>> from phyai.scaffold import Name
    >>> name = Name.parse("arm-guard")
    >>> name.id, name.dist, name.camel
    ('arm_guard', 'arm-guard', 'ArmGuard')
    """

    id: str

    @property
    def dist(self) -> str:
        return self.id.replace("_", "-")

    @property
    def camel(self) -> str:
        return "".join(part.capitalize() for part in self.id.split("_"))

    @classmethod
    def parse(cls, text: str) -> Name:
        """Return the names of a package; ConfigError when they cannot be used or are taken."""
        name = text.replace("-", "_")
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or len(name) > MAX_NAME:
            raise ConfigError(
                f"NAME must be lower-case words of letters and digits joined by _ or -, at most "
                f"{MAX_NAME} characters; got {text!r}. Take one such as my-policy."
            )
        if keyword.iskeyword(name) or keyword.issoftkeyword(name):
            raise ConfigError(f"NAME must be no word of Python; got {text!r}. Take another one.")
        if name in _reserved_ids():
            raise ConfigError(
                f"NAME must be free; got {text!r}, the id of another plugin. Take another one."
            )
        if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
            raise ConfigError(
                f"NAME must be free; got {text!r}, a module Python already finds. Take another one."
            )
        return cls(name)


def write_adapter(name: Name, kind: str, folder: Path) -> list[Path]:
    """Write an adapter package of ``kind`` into a new folder; return its files.

    Raises: ConfigError for an unknown kind or a folder that holds something.
    """
    if kind not in KINDS:
        raise ConfigError(
            f"--kind must be {' or '.join(KINDS)}; got {kind!r}.{did_you_mean(kind, KINDS)}"
        )
    words = {**_words(name), "network": _NETWORKS[kind]}
    return _write(("common", kind), words, folder)


def write_hook(name: Name, hook: str, folder: Path) -> list[Path]:
    """Write a hook package around one hook into a new folder; return its files.

    hook: one of ``HOOKS``, with or without ``phyai_``.
    Raises: ConfigError for an unknown hook or a folder that holds something.
    """
    full = hook if hook.startswith("phyai_") else f"phyai_{hook}"
    if full not in HOOKS:
        raise ConfigError(
            f"--hook must be one of {', '.join(sorted(HOOKS))}; got {hook!r}."
            + did_you_mean(full, HOOKS)
        )
    words = {**_words(name), "hook": full}
    return _write(("hook_common", _SHARED_TEMPLATES.get(full, full)), words, folder)


def _reserved_ids() -> frozenset[str]:
    known = json.loads((files("phyai") / "known_plugins.json").read_text(encoding="utf-8"))
    aliases = {alias for entry in known.values() for alias in entry.get("aliases", ())}
    return frozenset({*known, *aliases, *plugins.registered()})


def _words(name: Name) -> dict[str, str]:
    return {"id": name.id, "dist": name.dist, "class": name.camel}


def _write(trees: Sequence[str], words: Mapping[str, str], folder: Path) -> list[Path]:
    """Render the trees, later ones over earlier ones; the folder appears whole or not at all."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"--out must be a new folder; got the file {str(folder)!r}. Move it.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"--out must be a new or empty folder; got {str(folder)!r}, which holds files. "
            "Name another one."
        )
    rendered: dict[str, str] = {}
    for tree in trees:
        root = Path(__file__).parent / "templates" / tree
        for path in sorted(root.rglob("*.tmpl")):
            name = _fill(path.relative_to(root).as_posix().removesuffix(".tmpl"), words)
            name = re.sub(r"(^|/)dot-", r"\1.", name)
            rendered[name] = _fill(path.read_text(encoding="utf-8"), words)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            fresh = scratch / "new"
            for name, text in rendered.items():
                target = fresh / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            if folder.is_dir():
                folder.rmdir()
            fresh.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"--out must be writable; got {str(folder)!r} ({error}). Name another folder."
        ) from error
    return [folder / name for name in rendered]


def _fill(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"@@(\w+?)@@", lambda match: words[match[1]], text)
