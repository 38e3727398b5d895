"""Installs a project the way an editable install does, but into a folder of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = tuple(sorted(p.parent for p in (ROOT / "examples").glob("*/pyproject.toml")))


def sources(project: Path) -> Path:
    return project / "src"


def install(project: Path, site: Path) -> None:
    """Write the .dist-info of ``project`` into ``site``."""
    described = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = described["name"], described["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in described["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "RECORD").write_text("")


@contextmanager
def installed(project: Path, site: Path) -> Iterator[None]:
    """Let this process, and those it starts, see the project as an installed distribution."""
    install(project, site)
    paths = [str(site), str(sources(project))]
    before, variable = list(sys.path), os.environ.get("PYTHONPATH")
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([variable] if variable else [])])
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
        if variable is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = variable
        importlib.invalidate_caches()


def run_installed(
    project: Path, site: Path, *command: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python ...`` in the project's folder with the project installed."""
    with installed(project, site):
        return subprocess.run(
            [sys.executable, *command],
            cwd=project,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
