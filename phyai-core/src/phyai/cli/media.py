"""Media of `phyai run`: videos as inputs, results as files, both by the plugin's own MediaFiles."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import console
from phyai.cli.observation import read_image
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.manifest import AdapterManifest
    from phyai.media_files import MediaFiles


def media_files(manifest: AdapterManifest) -> MediaFiles | None:
    """Return what the plugin reads and writes media with; None when it has none."""
    if not manifest.media:
        return None
    module, _, name = manifest.media.partition(":")
    files: MediaFiles = getattr(importlib.import_module(module), name)()
    return files


def check_out(out: Path, manifest: AdapterManifest, request: Any, args: Any) -> MediaFiles:
    """Return what writes the result, after a look at the place, the ending and the encoders.

    Raises: ConfigError, also for a plugin without media; MissingDependency.
    """
    files = media_files(manifest)
    if files is None:
        raise ConfigError(
            f"--out needs a plugin that makes media; {manifest.id!r} makes none. "
            "Use --plot or --record."
        )
    files.check(out, request, args)
    console.check_writable("--out", out)
    return files


def read_views(found: Mapping[str, Path], manifest: AdapterManifest) -> dict[str, Any]:
    """Return image files as [height, width, 3] and video files as [T, height, width, 3]."""
    files = media_files(manifest) if found else None
    suffixes = tuple(files.suffixes) if files is not None else ()
    return {
        name: files.read(path)
        if files is not None and path.suffix.lower() in suffixes
        else read_image(path, name)
        for name, path in found.items()
    }


def parse_options(items: Sequence[str]) -> dict[str, Any]:
    """Return observation options of ``name=value`` texts; values are JSON, else plain text.

    The adapter says which names it knows.
    Raises: ConfigError for another form and a name given twice.
    """
    found: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--option must look like name=value; got {item!r}.")
        if name in found:
            raise ConfigError(f"--option must name an option once; got {name!r} twice. Drop one.")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found
