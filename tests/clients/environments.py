"""Throw-away environments for the clients of other projects: pinned, and built once."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 280.0  # of one build; they took 20 to 60 s
_TORCH = ("torch", "torchgen", "functorch", "torch-*.dist-info")
_WITH_TORCH = ("lerobot",)


def python_of(name: str, cache: Path, folder_of_pins: Path = HERE) -> Path:
    """Return the interpreter of the environment whose packages ``NAME.txt`` pins.

    It is built in ``cache`` unless it is there; of processes that ask at once one builds.
    Raises: RuntimeError with pip's words when the packages can't be had.
    """
    pins = (folder_of_pins / f"{name}.txt").read_text()
    key = hashlib.sha256(f"{pins}\n{sys.version}\n{Path(__file__).read_text()}".encode())
    folder = cache / f"{name}-{key.hexdigest()[:16]}"
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for old in cache.glob(f"{name}-*"):
                shutil.rmtree(old)
            _build(folder, folder_of_pins / f"{name}.txt")
            if name in _WITH_TORCH:
                _link_torch(folder)
            (folder / "complete").touch()
    return folder / "bin" / "python"


def _build(folder: Path, pins: Path) -> None:
    python = folder / "bin" / "python"
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    # Wheels alone: nothing is compiled, and no build script runs.
    wheels = ("--no-deps", "--only-binary=:all:", "--no-compile")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    _run(*pip, "install", *quiet, *wheels, "-r", str(pins))


def _link_torch(folder: Path) -> None:
    """Give it this environment's torch and no other package of it: it weighs most of a gigabyte."""
    (target,) = folder.glob("lib/python*/site-packages")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    packages = Path(spec.origin).parents[1]
    for pattern in _TORCH:
        for path in packages.glob(pattern):
            (target / path.name).symlink_to(path)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[-3:])} failed:\n{done.stderr[-2000:]}")
