"""Kubernetes' own schemas take the manifests; robots reach two gateways through a real Envoy."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import websockets

from phyai_gateway.client import Client, ServingError
from tests.clients.environments import python_of
from tests.gateway.stub_world import PI05
from tests.ports import free_ports

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KUBERNETES = "1.32"
LIMIT_S = 120.0


@pytest.fixture(scope="session")
def tools(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = getattr(pytestconfig, "cache", None)
    folder = tmp_path_factory.mktemp("tools") if cache is None else Path(cache.mkdir("deploy"))
    return python_of("tools", folder, HERE)


def test_manifests_follow_the_schemas(tools: Path) -> None:
    files = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
    files = [f for f in files if f.name not in ("serve.yaml", "kustomization.yaml")]
    assert len(files) == 3
    check = [str(tools), "-m", "kubernetes_validate", "-k", KUBERNETES, "--strict"]
    done = subprocess.run([*check, *map(str, files)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("passed") == 7


def test_robots_reach_gateways_through_envoy(tools: Path, tmp_path: Path) -> None:
    ports = free_ports(9)
    grpc, openpi, first, second, first_ws, second_ws, http, other_http, admin = ports
    moved = {
        "10000": grpc, "10001": openpi, "50111": first, "50112": second, "8000": first_ws,
        "8001": second_ws, "9901": admin,
    }  # fmt: skip
    text = (ROOT / "deploy/envoy/envoy.yaml").read_text(encoding="utf-8")
    for number, free in moved.items():
        assert f"port_value: {number}}}" in text
        text = text.replace(f"port_value: {number}}}", f"port_value: {free}}}")
    text = text.replace("terval: 5s", "terval: 0.5s")  # of health checks: two of a kind
    config = tmp_path / "envoy.yaml"
    config.write_text(text, encoding="utf-8")
    envoy = next(tools.parents[1].glob("lib/python*/site-packages/envoy/_bin/envoy"))
    envoy.chmod(0o755)
    with ExitStack() as stack:
        stub = stack.enter_context(_process("-m", "tests.gateway.stub_server", "7", "0"))
        assert stub.stdout is not None
        backend = ("--backend", "pi05", f"127.0.0.1:{int(stub.stdout.readline())}")
        gateways = [
            stack.enter_context(
                _process(
                    "-m", "phyai_gateway.cli", *backend, "--gateway", f"127.0.0.1:{native}",
                    "--http-port", str(page), "--listen", f"openpi=127.0.0.1:{ws}",
                )
            )
            for native, page, ws in ((first, http, first_ws), (second, other_http, second_ws))
        ]  # fmt: skip
        command = [str(envoy), "--concurrency", "1", "--log-level", "error", "-c", str(config)]
        stack.enter_context(_process(*command, program=True))
        _until_answered(grpc)
        assert asyncio.run(_metadata(openpi))["model"] == "pi05"
        gateways[0].kill()
        gateways[0].wait(10)
        _until_answered(grpc)
        with Client(f"127.0.0.1:{grpc}", model="pi05", timeout_s=20) as client:
            for _ in range(10):  # the dead one is known by now: every request meets the other
                assert _ask(client) == 7.0


@contextmanager
def _process(*arguments: str, program: bool = False) -> Iterator[subprocess.Popen[str]]:
    command = list(arguments) if program else [sys.executable, *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def _ask(client: Client) -> float:
    images = {name: np.zeros((8, 8, 3), np.uint8) for name in PI05.cameras}
    found = client.infer(images, np.zeros(PI05.state_dim or 0, np.float32), "go")
    return float(np.asarray(found).reshape(-1)[0])


def _until_answered(port: int, in_a_row: int = 3) -> None:
    """Ask until so many requests in a row are answered."""
    end, good = time.monotonic() + LIMIT_S, 0
    with Client(f"127.0.0.1:{port}", model="pi05", timeout_s=20) as client:
        while good < in_a_row:
            time.sleep(0.1)
            try:
                assert _ask(client) == 7.0
                good += 1
            except ServingError:
                good = 0
                assert time.monotonic() < end


async def _metadata(port: int) -> dict[str, object]:
    async with websockets.connect(f"ws://127.0.0.1:{port}/", compression=None) as socket:
        found: dict[str, object] = msgpack.unpackb(await socket.recv(), strict_map_key=False)
        return found
