"""Which listeners the command line asks for, and robots that are known again after a restart."""

from __future__ import annotations

import asyncio
import importlib
import re
import time
import tomllib
from pathlib import Path

import grpc
import pytest
import yaml

from phyai.config_mapping import from_mapping
from phyai_gateway.cli import parser
from phyai_gateway.contract import ModelContract
from phyai_gateway.listeners import Listen
from phyai_gateway.listens import listens_of
from phyai_gateway.running import plan_of
from phyai_gateway.server.config import ServerOptions
from tests.gateway import lerobot_robot as robot
from tests.gateway.stub_world import StubBackend, run, world
from tests.gateway.test_gateway_cli import gateway, model_server, serving
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]


def asked(*words: str) -> dict[str, Listen]:
    """Return the listeners beside the native one, by protocol and number."""
    _, *found = listens_of(parser().parse_args(words))
    return {f"{one.protocol}{index}": one for index, one in enumerate(found)}


def test_every_protocol_of_the_package_is_a_listener() -> None:
    text = (ROOT / "phyai-gateway/pyproject.toml").read_text("utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["phyai.protocols"]
    assert {"native", "lerobot", "openpi", "gr00t", "rlinf", "kserve", "kserve-grpc", "robot"} <= (
        set(points)
    )
    ports: list[int] = []
    for name, value in points.items():
        module, _, kind = value.partition(":")
        found = getattr(importlib.import_module(module), kind)
        assert found.name == name
        ports.append(found.default_port)
    assert len(set(ports)) == len(ports)


def test_the_commands_of_the_document_are_understood() -> None:
    text = (ROOT / "docs/serving_protocols.md").read_text("utf-8")
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("phyai-gateway ")]
    assert len(commands) >= 3
    for words in commands:
        plan_of(parser().parse_args(words))
    servers = [
        from_mapping(ServerOptions, yaml.safe_load(block)["server"], "server")
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        if "server:" in block
    ]
    assert [server.register_with for server in servers] == [("10.0.0.1:50111", "10.0.0.2:50111")]


def test_robot_words() -> None:
    found = asked("--robot-model", "arm")["robot0"]
    assert (found.host, found.port) == ("127.0.0.1", None)
    assert found.options == {"model": "arm", "max_observation_age_s": "1.0"}
    found = asked("--robot", "127.0.0.1:9", "--max-observation-age", "2")["robot0"]
    assert (found.port, found.options) == (9, {"max_observation_age_s": "2.0"})
    assert not asked()


def test_each_lerobot_listener_keeps_its_robots_beside_the_state(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    words = ["--lerobot", "--listen", "lerobot=127.0.0.1:1", "--listen", "openpi"]
    words += ["--listen", "lerobot=127.0.0.1:2,state_file=mine"]
    files = {
        name: one.options.get("state_file") for name, one in asked(*words, "--state", state).items()
    }
    assert files == {
        "lerobot0": f"{state}.lerobot",
        "openpi1": None,
        "lerobot2": "mine",
        "lerobot3": f"{state}.lerobot-2",
    }
    assert not any("state_file" in one.options for one in asked("--lerobot").values())


@pytest.mark.slow
def test_a_killed_gateway_knows_its_robots_again(tmp_path: Path) -> None:
    """The robot goes on with the same connection, without another handshake."""

    async def work() -> None:
        contract = ModelContract("policy", action_dim=1, horizon=1)
        async with world() as w, model_server(w) as (_, endpoint):
            stub = await w.add(StubBackend(2.5, contract), "policy")
            native, http, port = free_ports(3)
            words = ("--gateway", f"127.0.0.1:{native}", "--http-port", str(http))
            words += ("--lerobot", f"127.0.0.1:{port}", "--backend", "policy", endpoint)
            words += ("--state", str(tmp_path / "state.json"))
            with robot.Robot(port) as client:
                async with gateway(*words) as process:
                    await serving(http)
                    assert await asyncio.to_thread(client.ready) is grpc.StatusCode.OK
                    assert (await asyncio.to_thread(client.set_up, robot.setup()))[0] is (
                        grpc.StatusCode.OK
                    )
                    assert await chunk(client, 1) == [2.5]
                    process.inner.kill()
                    await process.ended()
                async with gateway(*words):
                    await serving(http)
                    assert await chunk(client, 2) == [2.5]
            assert len(stub.seen) >= 2

    async def chunk(client: robot.Robot, timestep: int) -> list[float]:
        """Send one observation until it is taken, and return the actions."""
        ends = time.monotonic() + 30
        sent, text = await asyncio.to_thread(client.send, robot.observation(timestep))
        while sent is not grpc.StatusCode.OK:
            assert time.monotonic() < ends, text
            await asyncio.sleep(0.2)
            sent, text = await asyncio.to_thread(client.send, robot.observation(timestep))
        found = await asyncio.to_thread(client.actions)
        assert [one.timestep for one in found] == [timestep]
        return [float(one.action[0]) for one in found]

    run(work, 90)
