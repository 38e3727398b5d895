"""`phyai serve` as an operator uses it: own process, signals, killed clients, bad files."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai.cli.app import main
from phyai.engine import Engine
from phyai.types import Observation
from phyai_gateway.client import AsyncClient, Client, ServerUnavailable, ServingError
from phyai_gateway.server import config as server_config
from tests.gateway.serving import isolated as isolated
from tests.gateway.serving import register, run, write_config
from tests.native_cache import share_native

ROOT = Path(__file__).parents[2]
PHYAI = [sys.executable, "-c", "import sys; from phyai.cli.app import main; sys.exit(main())"]
START_S = 120.0  # importing torch, on a machine that does much else


@dataclass
class Process:
    """A server process and what it said on stderr."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def ports(self) -> dict[str, int]:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in self.lines:
                if "is ready on" in line:
                    return {name: int(port) for name, port in re.findall(r"(\w+) (\d+)", line)}
            time.sleep(0.05)
        raise AssertionError("\n".join(self.lines))

    def read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())


@contextlib.contextmanager
def served(*arguments: str, **options: Any) -> Iterator[Process]:
    process = subprocess.Popen(
        [*PHYAI, "serve", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        **options,
    )
    found = Process(process)
    reader = threading.Thread(target=found.read, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        reader.join(10)


FREE = ("--set", "server.port=0", "--set", "server.http_port=0")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    share_native(folder)
    return folder


@pytest.mark.slow
def test_pi05_from_the_example(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same numbers as the engine, a killed client, and SIGTERM under load, on one server."""
    monkeypatch.setenv("PHYAI_CACHE", str(cache))
    example = str(ROOT / "examples" / "serve_pi05.yaml")
    device = ("--set", "config.device.target=cpu", "--set", "config.device.params_dtype=float32")
    queue = ("--set", "server.max_queue=64", "--set", "server.grace_seconds=60")
    arguments = (example, "--preset", "tiny", *device, *FREE, *queue)
    with served(*arguments) as server:
        ports = server.ports()
        where = f"127.0.0.1:{ports['native']}"
        settings = tuple(item for item in (*device, *queue) if item != "--set")
        loaded = server_config.load(example, settings, "tiny")
        seen = _observation(where)
        with Engine(loaded.args, deployment=loaded.deployment) as engine:
            wanted = engine.step(seen).actions
        with Client(where, model="pi05") as client:
            found = client.infer(seen.images, seen.state, seen.prompt, options=seen.options)
            assert np.array_equal(found, wanted)
            killed = _client_process(where)
            killed.kill()
            killed.wait()
            found = client.infer(seen.images, seen.state, seen.prompt, options=seen.options)
            assert np.array_equal(found, wanted)
        answered, refused = _terminate_under_load(server.process, where, seen, wanted)
        assert server.process.wait(60) == 0, server.lines
        assert answered > 0
        assert refused > 0  # otherwise the signal came after the load
    assert "Stopped." in server.lines


def _observation(where: str) -> Observation:
    with Client(where, model="pi05") as client:
        contract = client.contract()
    random = np.random.default_rng(0)
    images = {
        name: random.integers(0, 255, (32, 32, 3), dtype=np.uint8) for name in contract.cameras
    }
    state = random.random(contract.state_dim, dtype=np.float32)
    assert contract.horizon > 0
    assert len(contract.action_names) == contract.action_dim
    return Observation(images, state, "lift the cup", {"seed": 5})


def _client_process(where: str) -> subprocess.Popen[bytes]:
    """Start a client that sends without end, and return when it has got an answer."""
    code = (
        "import numpy as np, sys\n"
        "from phyai_gateway.client import Client\n"
        "c = Client(sys.argv[1]); k = c.contract()\n"
        "i = {n: np.zeros((64, 64, 3), np.uint8) for n in k.cameras}\n"
        "while True:\n"
        "    c.infer(i, np.zeros(k.state_dim), 'go')\n"
        "    print('x', flush=True)\n"
    )
    found = subprocess.Popen([sys.executable, "-c", code, where], stdout=subprocess.PIPE)
    assert found.stdout is not None
    assert found.stdout.readline() == b"x\n"
    return found


def _terminate_under_load(
    process: subprocess.Popen[str], where: str, seen: Observation, wanted: Any
) -> tuple[int, int]:
    """Send SIGTERM while 8 robots ask; return how many got actions, and a typed refusal.

    Each request ends in one of the two; a request that may have run and got no answer is lost.
    """
    answered = refused = 0
    lost: list[ServingError] = []

    async def robot(client: AsyncClient) -> None:
        nonlocal answered, refused
        while True:
            try:
                found = await client.infer(
                    seen.images, seen.state, seen.prompt, options=seen.options, timeout_s=60
                )
            except ServerUnavailable as error:
                if error.started:
                    lost.append(error)
                refused += 1
                return
            assert np.array_equal(found, wanted)
            answered += 1
            if answered == 8:
                process.send_signal(signal.SIGTERM)

    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(where, model="pi05")) for _ in range(8)
            ]
            await asyncio.gather(*(robot(client) for client in clients))

    run(test)
    assert not lost
    return answered, refused


# ---------------------------------------------------------------- files


def phyai(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run a command line in this process; return exit code, stdout and stderr."""
    capsys.readouterr()
    code = main([*arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_check_says_that_a_file_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text((ROOT / "examples" / "serve_pi05.yaml").read_text())
    for command in ("serve", "server"):
        code, out, err = phyai(capsys, command, str(file), "--check")
        assert (code, out) == (0, f"Configuration valid: {file}\n"), err
    setting = "plugin_args.checkpoint_dir=./no"
    code, _, err = phyai(capsys, "serve", str(file), "--check", "--set", setting)
    assert code == 2
    assert "plugin_args.checkpoint_dir must exist" in err


def test_a_bad_file_ends_with_2_and_its_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    file = str(write_config(tmp_path, host="0.0.0.0"))
    code, _, err = phyai(capsys, "serve", file)
    assert code == 2
    assert err.startswith("server.host must be a loopback address"), err
    code, _, err = phyai(capsys, "serve", file, "--check", "--insecure-bind")
    assert code == 0
    assert "open to everybody" in err


def test_commands_import_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, phyai_gateway.server.commands as c\n"
        "assert sorted(c.phyai_commands()) == ['serve', 'server']\n"
        "bad = {'torch', 'grpc', 'numpy'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=START_S)


def test_help_lists_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = phyai(capsys, "--help")
    assert code == 0
    assert "Serve one model to robots and gateways." in out


def test_sigterm_while_loading_ends_the_process() -> None:
    code = "import sys, tests.gateway.slow_start as s; sys.exit(s.main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "loading begins" in line:
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "Stopped while loading." in process.stderr.read()
    finally:
        process.kill()
        process.wait()


def test_an_engine_that_cannot_load_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register()
    file = str(write_config(tmp_path))
    code, _, err = phyai(capsys, "serve", file, "--set", "deployment.replica_count=0")
    assert code == 2
    assert "deployment.replica_count" in err
    code, _, err = phyai(capsys, "serve", file, "--set", "plugin_args.max_batch_size=2.5")
    assert code == 2
    assert "plugin_args.max_batch_size" in err
    code, _, err = phyai(capsys, "serve", file, "--set", "config.device.target=cuda:99")
    assert code in (1, 2, 3)
    assert "cuda" in err
    assert "Traceback" not in err
