"""A worker finds the plugin anew, by id, distribution and version, in its own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phyai import plugins
from phyai.testing.sandbox import Sandbox

MODEL = """
import torch
from phyai.adapter import Adapter, AdapterArgs
from phyai.types import Key, Prepared

class Args(AdapterArgs):
    pass

class Falling:
    prediction = "velocity"
    def __call__(self, x, step, cache):
        return {"action": torch.full_like(x["action"], %s)}

class Model(Adapter):
    name = "falling"
    args_cls = Args
    def prepare(self, request):
        return Prepared({"noise.action": request}, len(request), Key(num_steps=2))
    def denoiser(self):
        return Falling()
"""
WORKER = """
import multiprocessing

def serve(pipe, plugin, version):
    import torch
    from phyai.engine_config import DeviceConfig, EngineConfig
    from phyai.engine_core import EngineCore
    from phyai.plugins import find
    try:
        args = find(plugin).load_args()()
        config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="float32"))
        core = EngineCore(plugin, args, config, version=version)
        answer = core.step(torch.zeros(1, 2, 1)).flatten().tolist()
        core.close()
        pipe.send(answer)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
"""
PARENT = """
import multiprocessing
from worker import serve
context = multiprocessing.get_context("spawn")
ours, theirs = context.Pipe()
process = context.Process(target=serve, args=(theirs, {plugin!r}, {version!r}))
process.start()
result = ours.recv()
process.join()
"""


def install(sandbox: Sandbox, version: str, dist: str, speed: float) -> None:
    sandbox.adapter("falling", dist=dist, version=version, model=MODEL % speed)


def ask_worker(sandbox: Sandbox, plugin: str, version: str) -> Any:
    """Return the answer of a process that is spawned by one that sees the sandbox."""
    (sandbox.folder / "worker.py").write_text(WORKER)
    code = PARENT.format(plugin=plugin, version=version)
    return sandbox.ask(f"if __name__ == '__main__':\n    exec({code!r})", isolated=False)


@pytest.mark.slow
def test_a_spawned_worker_picks_the_distribution_it_is_told(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path / "site")
    install(sandbox, "1.0", "fall-slow", 1.0)
    install(sandbox, "2.0", "fall-fast", 3.0)
    with sandbox.visible():
        record = plugins.find("fall-fast:falling")
    told = record.qualified_id, record.version
    assert told == ("fall-fast:falling", "2.0")
    assert ask_worker(sandbox, *told) == [-3.0, -3.0]


def test_a_worker_whose_environment_has_another_version_refuses(tmp_path: Path) -> None:
    parent, worker = Sandbox(tmp_path / "parent"), Sandbox(tmp_path / "worker")
    install(parent, "1.0", "fall-slow", 1.0)
    install(worker, "1.1", "fall-slow", 1.0)
    with parent.visible():
        record = plugins.find("falling")
    answer = ask_worker(worker, record.qualified_id, record.version)
    for words in ("'falling' of fall-slow must have version '1.0'", "got '1.1'", "same version"):
        assert words in answer
