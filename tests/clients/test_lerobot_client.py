"""The unmodified RobotClient of lerobot, driving a stand-in robot through a gateway."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai.engine import Engine
from phyai.types import Observation
from phyai_gateway.server import config as server_config
from tests.clients.fleet import Fleet, client_command, run_client
from tests.clients.models import mirrored

pytestmark = pytest.mark.slow

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb")
TASK = "put the cube into the box"
HORIZON = 50
CHUNKS = 50
RESTART_AFTER = 20


def settings(fleet: Fleet, **changes: Any) -> str:
    plain = {
        "port": fleet.ports["lerobot"],
        "policy": "so101",
        "joints": 6,
        "moved": 6,
        "cameras": {"front": (480, 640), "wrist": (240, 320)},
        "actions_per_chunk": 20,
        "threshold": 0.7,
        "task": TASK,
        "chunks": CHUNKS,
    }
    return json.dumps(plain | changes)


def test_fifty_chunks_and_a_gateway_that_restarts(
    fleet: Fleet, client_python: Callable[[str], Path], tmp_path: Path
) -> None:
    """The client does no second handshake: the gateway that comes back knows its robot."""
    out = tmp_path / "seen.npz"
    python = client_python("lerobot")
    command = client_command(python, "drive_lerobot.py", settings(fleet), str(out))
    answered: list[int] = []
    log = (tmp_path / "client.log").open("w+")
    with (
        log,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=tmp_path
        ) as client,
    ):
        assert client.stdout is not None
        for _ in range(RESTART_AFTER):
            assert client.stdout.readline() == "chunk\n", (tmp_path / "client.log").read_text()
        answered += fleet.answered("so101")
        fleet.kill_gateway()
        fleet.start_gateway()
        lines = client.communicate(timeout=250)[0].splitlines()
    answered += fleet.answered("so101")
    assert client.returncode == 0, (tmp_path / "client.log").read_text()
    said = json.loads(lines[-1])
    print(f"lerobot client: ack {said['ack_ms']} ms, observation to chunk {said['chunk_ms']} ms")
    assert said["chunks"] == CHUNKS
    assert min(answered) > 0, answered  # both servers, before and after
    _check_form(said, rows=20)
    seen = np.load(out)
    for index in range(CHUNKS):
        wanted = mirrored(_observation(seen, index), HORIZON, 6)
        assert np.array_equal(seen[f"{index}/actions"], wanted[:20])


def test_large_pictures_and_a_real_engine(
    fleet: Fleet, client_python: Callable[[str], Path], tmp_path: Path
) -> None:
    """Observations of several messages, and the actions of pi0.5's small checkpoint."""
    out = tmp_path / "seen.npz"
    changes = {"policy": "libero", "joints": 8, "moved": 7, "chunks": 5, "actions_per_chunk": 50}
    cameras = {"front": (720, 1280), "wrist": (480, 640)}
    text = settings(fleet, **changes, cameras=cameras)
    python, run = client_python("lerobot"), "drive_lerobot.py"
    lines = run_client(python, run, text, str(out), limit_s=200, folder=tmp_path).splitlines()
    said = json.loads(lines[-1])
    assert said["chunks"] == 5
    _check_form(said, rows=50)
    seen = np.load(out)
    with Engine(server_config.load(fleet.files["libero"]).args) as engine:
        for index in range(5):
            wanted = engine.step(_observation(seen, index)).actions
            assert np.array_equal(seen[f"{index}/actions"], wanted)


def _check_form(said: dict[str, Any], rows: int) -> None:
    """Check what the client relies on: float32 rows, contiguous steps and times."""
    assert said["types"] == ["torch.float32"]
    assert said["performed"] > 0
    for steps, times, first in zip(said["steps"], said["times"], said["observed_at"], strict=True):
        assert steps == list(range(first, first + rows))
        ticks = np.diff(times)
        assert np.allclose(ticks, ticks[0])
        assert ticks[0] > 0


def _observation(seen: Any, index: int) -> Observation:
    pictures = (seen[f"{index}/front"], seen[f"{index}/wrist"])
    images = dict(zip(CAMERAS, pictures, strict=True))
    return Observation(images, seen[f"{index}/state"].astype(np.float32), TASK)
