"""A worker process inside a model server is killed while robots ask through the gateway."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from tests.faults.processes import SOON_S, Gateway, Process, eventually, run
from tests.faults.robots import CODE, robots
from tests.gateway.http_client import fetch
from tests.native_cache import share_native

pytestmark = pytest.mark.slow
PHYAI = (sys.executable, "-c", "import sys; from phyai.cli.app import main; sys.exit(main())")
SERVER = {
    "plugin": "pi05",
    "plugin_args": {"max_batch_size": 1},
    "config": {"device": {"target": "cpu", "params_dtype": "float32"}},
    "deployment": {"replica_count": 2, "devices": ["cpu", "cpu"]},
    "server": {"model_name": "stub", "port": 0, "http_port": 0, "max_queue": 16},
}
RESTARTED_S = 120.0  # a fork of the loader, and a first request


def children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(p) for task in tasks for p in (task / "children").read_text().split()]
    except FileNotFoundError:
        return []


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            continue
        if state != "Z":
            found.append(pid)
    return found


class Server(Process):
    """``phyai serve`` with two replicas of a tiny pi0.5."""

    def __init__(self, folder: Path) -> None:
        file = folder / "serve.yaml"
        file.write_text(json.dumps(SERVER))
        super().__init__(*PHYAI, "serve", str(file), "--preset", "tiny")
        self.ports: dict[str, int] = {}

    async def start(self) -> None:
        await super().start()
        line = await self.says("is ready on", 200)
        self.ports = {name: int(port) for name, port in re.findall(r"(\w+) (\d+)", line)}

    def loader(self) -> int:
        """Return the process that the workers are forks of."""
        (found,) = children(self.inner.pid)
        return found

    def workers(self) -> list[int]:
        return children(self.loader())

    async def replicas_up(self) -> int:
        text = (await fetch(self.ports["http"], "GET", "/metrics")).body.decode()
        return len(re.findall(r"^phyai_replica_up\{.*\} 1\.0$", text, re.MULTILINE))


async def maker(server: Server) -> Any:
    """Return what makes requests that the model takes."""
    contract = (await fetch(server.ports["http"], "GET", "/v1/models/stub")).json
    pixels = bytes(32 * 32 * 3)
    images = [
        pb.Image(name=name, data=pixels, shape=(32, 32, 3), dtype=1, encoding=1, layout=1)
        for name in contract["cameras"]
    ]
    width = contract["state_dim"]
    state = pb.Tensor(data=bytes(4 * width), shape=(width,), dtype=6)

    def make(request_id: str) -> bytes:
        whole = pb.InferenceRequest(
            request_id=request_id, images=images, robot_state=state, instruction="go",
            model_name="stub",
        )  # fmt: skip
        data: bytes = whole.SerializeToString()
        return data

    return make


def test_a_killed_worker_costs_its_own_request_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost: <= 2, what it ran; the other replica goes on; the loader's death costs nothing.

    When the server itself is killed, none of its processes is left.
    """
    cache = tmp_path / "cache"
    cache.mkdir()
    share_native(cache)
    monkeypatch.setenv("PHYAI_CACHE", str(cache))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def work() -> None:
        server = Server(tmp_path)
        await server.start()
        gateway = Gateway([f"127.0.0.1:{server.ports['native']}"])
        everything: list[int] = []
        try:
            await gateway.start()
            await gateway.serving()
            make = await maker(server)
            async with robots(gateway.ports["native"], 4, deadline_s=30.0, make=make) as load:
                await load.more(20, 60)
                assert not load.bad(), load.bad()
                first = server.workers()
                assert len(first) == 2
                os.kill(first[0], signal.SIGKILL)
                at = time.monotonic()
                await load.more(10, 60)  # by the other one
                print(f"10 answers {time.monotonic() - at:.2f} s after the kill")

                async def whole() -> bool:
                    return await server.replicas_up() == 2 and first[0] not in server.workers()

                took = await eventually(whole, RESTARTED_S, "the worker is replaced")
                print(f"replaced after {took:.2f} s; {load.codes(at)}")
                await load.more(20, 60)
                lost = load.bad()
                assert len(lost) <= 2, lost
                assert {one.code for one in lost} <= {CODE.UNAVAILABLE, CODE.INTERNAL}, lost
                everything = [*server.workers(), server.loader()]
                os.kill(server.loader(), signal.SIGKILL)
                await load.more(20, 60)
                assert len(load.bad()) == len(lost), load.bad()
            everything += children(server.inner.pid)
            server.inner.kill()
            await server.ended()

            async def gone() -> bool:
                return not alive(everything)

            await eventually(gone, SOON_S, f"processes {alive(everything)} end")
        finally:
            for process in (gateway, server):
                if process.inner is not None:
                    await process.kill()

    run(work, 280)
