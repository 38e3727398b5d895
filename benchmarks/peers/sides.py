"""The worker of each side: its command, its environment variables, its packages."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "command:"
ENVIRONMENTS = {
    "hf": "hf",
    "hf-compiled": "hf",
    "hf-bf16-vision": "hf",
    "hf-kv-cache": "hf",
    "hf-sdpa": "hf-minicpm",
    "diffusers": "diffusers",
    "openvino": "openvino",
    "lerobot": "lerobot",
}


class NotSetUp(Exception):
    """The environment of a peer is missing or cannot be made."""


def peer_command(peer: str, own: Mapping[str, str]) -> list[str]:
    """Return the command of a known peer's worker.

    own: peer -> environment where the model needs another than the usual one.
    Raises: NotSetUp.
    """
    if peer.startswith(COMMAND):
        return shlex.split(peer.removeprefix(COMMAND))
    if peer == "phyai":
        return our_command("")
    environment = own.get(peer, ENVIRONMENTS[peer])
    python = ROOT / ".peers" / environment / "bin" / "python"
    if not python.exists():
        raise NotSetUp(
            f"peer {peer!r} must be set up; {python.relative_to(ROOT)} does not exist. "
            f"Run: python benchmarks/paired.py --setup {environment}"
        )
    return [str(python), "-m", "benchmarks.peers.worker", peer]


def our_command(options: str) -> list[str]:
    if options.startswith(COMMAND):
        return shlex.split(options.removeprefix(COMMAND))
    return [sys.executable, "-m", "benchmarks.peers.worker", "phyai", *shlex.split(options)]


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """Return what both workers get: so many threads, and none that spins while it waits."""
    threads = str(args.threads)
    values = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    if args.wait_policy == "passive":
        values |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    return values | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def setup_environment(name: str, python: str) -> None:
    """Create ``.peers/NAME`` and install the pinned packages into it.  Raises: NotSetUp."""
    folder = ROOT / ".peers" / name
    requirements = ROOT / "benchmarks" / "peers" / f"requirements-{name}.txt"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-r", str(requirements)]
    try:
        subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=300)
        subprocess.run(pip, check=True, timeout=3600)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise NotSetUp(f"environment {name!r} must install; {error}.") from error
