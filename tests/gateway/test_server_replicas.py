"""`phyai serve` with replicas in worker processes: same numbers, metrics of each, nothing lost."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from phyai.engine import Engine
from phyai_gateway.client import Client, ServerUnavailable
from phyai_gateway.server import config as server_config
from tests.gateway.serving import isolated as isolated
from tests.gateway.test_server_command import (
    FREE,
    ROOT,
    Process,
    _observation,
    _terminate_under_load,
    served,
)
from tests.gateway.test_server_command import cache as cache

DEVICE = ("--set", "config.device.target=cpu", "--set", "config.device.params_dtype=float32")
QUEUE = ("--set", "server.max_queue=64", "--set", "server.grace_seconds=60")
REPLICAS = ("--set", "deployment.mode=local", "--set", "deployment.replica_count=2")
RESTART_S = 60.0


@pytest.mark.slow
def test_two_replicas_behind_one_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHYAI_CACHE", str(cache))
    example = str(ROOT / "examples" / "serve_pi05.yaml")
    with served(example, "--preset", "tiny", *DEVICE, *FREE, *QUEUE, *REPLICAS) as server:
        ports = server.ports()
        where = f"127.0.0.1:{ports['native']}"
        loaded = server_config.load(example, DEVICE[1::2], "tiny")
        seen = _observation(where)
        with Engine(loaded.args) as engine:
            wanted = engine.step(seen).actions
        with Client(where, model="pi05") as client:

            def ask(_: int) -> np.ndarray:
                return client.infer(seen.images, seen.state, seen.prompt, options=seen.options)

            with ThreadPoolExecutor(4) as threads:
                for found in threads.map(ask, range(12)):
                    assert np.array_equal(found, wanted)
            done = _done(ports["http"])
            assert set(done) == {"0", "1"}
            assert min(done.values()) >= 2  # of the first four
            workers = _workers(server)
            assert len(workers) == 2
            os.kill(workers[0], signal.SIGKILL)
            deadline = time.monotonic() + RESTART_S
            while len(_workers(server)) < 2 or workers[0] in _workers(server):
                assert time.monotonic() < deadline, server.lines
                with suppress(ServerUnavailable):  # one that the dead worker had already
                    assert np.array_equal(ask(0), wanted)  # the other one goes on
        answered, refused = _terminate_under_load(server.process, where, seen, wanted)
        assert server.process.wait(60) == 0, server.lines
        assert answered > 0
        assert refused > 0
    assert "Stopped." in server.lines


def _done(port: int) -> dict[str, float]:
    """Return the completed requests of each replica, as the metrics tell them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = re.findall(r"^phyai_replica_requests_total\{([^}]*)\} (\S+)", text, re.M)
    names = {re.search(r'replica="(\d+)"', labels): value for labels, value in found}
    return {match.group(1): float(value) for match, value in names.items() if match}


def _workers(server: Process) -> list[int]:
    """Return the process ids of the workers: children of the server's loader."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] not in "ZX":
                parents[int(entry.name)] = int(stat[1])
    loaders = {pid for pid, parent in parents.items() if parent == server.process.pid}
    return sorted(pid for pid, parent in parents.items() if parent in loaders)
