"""openpi's client from PyPI, unmodified, against a gateway over two model server processes."""

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
from phyai_gateway.contract import ModelContract
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.openpi import OpenpiListener
from phyai_gateway.server import config as server_config
from phyai_gateway.tokens import TokenStore
from tests.clients.fleet import Fleet, client_command, run_client
from tests.clients.models import mirrored
from tests.gateway.stub_router import HORIZON, StubRouter, loop_thread, serving

pytestmark = pytest.mark.slow

TOKEN = "a-key-that-is-long-enough-for-it"
SLOTS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


def test_layouts_and_errors(
    fleet: Fleet, client_python: Callable[[str], Path], tmp_path: Path
) -> None:
    out = tmp_path / "seen.npz"
    arguments = ("layouts", str(fleet.ports["openpi"]), str(out))
    python = client_python("openpi")
    said = json.loads(
        run_client(python, "drive_openpi.py", *arguments, limit_s=120, folder=tmp_path)
    )
    seen = np.load(out)
    for name, (horizon, width) in {"libero": (50, 7), "droid": (10, 8), "aloha": (50, 14)}.items():
        metadata, rounds = said[name]["metadata"], said[name]["rounds"]
        assert metadata["model"] == name
        assert (metadata["action_horizon"], metadata["action_dim"]) == (horizon, width)
        for turn, got in enumerate(rounds):
            assert got["keys"] == ["actions", "policy_timing", "server_timing"]
            assert (got["dtype"], got["shape"]) == ("<f4", [horizon, width])
            assert got["policy"]["infer_ms"] > 0
            assert set(got["timing"]) == {"infer_ms", *(["prev_total_ms"] if turn else [])}
    _check_mirrors(seen)
    _check_pi05(fleet.files["libero"], seen)
    assert np.array_equal(seen["libero/as_uint8"], seen["libero/as_float_chw"])
    assert np.array_equal(seen["libero/as_uint8"], seen["libero/after_error"])
    first_rows = seen["libero/as_uint8"][[0, 1, 2, 3, 4, 0, 1]]
    assert np.array_equal(seen["libero/one_by_one"], first_rows)
    text = said["text"]["first"]
    assert text.startswith("RuntimeError: Error in inference server:")
    assert "8 values; got 3" in text
    assert "Traceback" not in text.partition("\n")[2]
    assert said["text"]["second"].startswith("ConnectionClosedError")
    for name in ("libero", "droid", "aloha"):
        counts = fleet.answered(name)
        assert len(counts) == 2
        assert min(counts) > 0  # both processes served every model


def _check_mirrors(seen: Any) -> None:
    for turn in range(2):
        sent = _sent(seen, f"droid/{turn}/sent/")
        pictures = (sent["observation/exterior_image_1_left"], sent["observation/wrist_image_left"])
        state = np.concatenate(
            (sent["observation/joint_position"], sent["observation/gripper_position"])
        )
        observation = Observation(
            dict(zip(SLOTS, pictures, strict=False)), state, "pick up the marker"
        )
        assert np.array_equal(seen[f"droid/{turn}/actions"], mirrored(observation, 10, 8))
        sent = _sent(seen, f"aloha/{turn}/sent/")
        cameras = ("cam_high", "cam_left_wrist", "cam_right_wrist")  # cam_low is no input
        images = {
            slot: sent[f"images/{camera}"].transpose(1, 2, 0)
            for slot, camera in zip(SLOTS, cameras, strict=True)
        }
        observation = Observation(images, sent["state"], "transfer the cube")
        assert np.array_equal(seen[f"aloha/{turn}/actions"], mirrored(observation, 50, 14))


def _check_pi05(file: Path, seen: Any) -> None:
    loaded = server_config.load(file)
    with Engine(loaded.args) as engine:
        for turn in range(2):
            sent = _sent(seen, f"libero/{turn}/sent/")
            images = {
                "base_0_rgb": sent["observation/image"],
                "left_wrist_0_rgb": sent["observation/wrist_image"],
            }
            state = sent["observation/state"].astype(np.float32)
            wanted = engine.step(Observation(images, state, "put the bowl on the plate")).actions
            assert np.array_equal(seen[f"libero/{turn}/actions"], wanted)


def _sent(seen: Any, prefix: str) -> dict[str, Any]:
    return {k.removeprefix(prefix): seen[k] for k in seen.files if k.startswith(prefix)}


def test_gateway_restarts(
    fleet: Fleet, client_python: Callable[[str], Path], tmp_path: Path
) -> None:
    """A killed gateway costs its connections; a new one gives the same answers."""
    arguments = ("lasting", str(fleet.ports["openpi"]), "60")
    command = client_command(client_python("openpi"), "drive_openpi.py", *arguments)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as client:
        assert client.stdout is not None
        for _ in range(20):
            assert client.stdout.readline() == "answered\n"
        fleet.kill_gateway()
        fleet.start_gateway()
        said = json.loads(client.communicate(timeout=120)[0].splitlines()[-1])
    assert said["answers"] == 60
    assert said["same"]
    causes = [line.partition(":")[0] for line in said["broken"]]
    assert causes.count("ConnectionClosedError") == 1, said
    assert set(causes) <= {"ConnectionClosedError", "ConnectionRefusedError"}, said


def test_keys(client_python: Callable[[str], Path], tmp_path: Path) -> None:
    """A protected listener: no key, a wrong one, the right one."""
    contract = ModelContract("libero", cameras=dict.fromkeys(SLOTS[:2]), state_dim=8, action_dim=7)
    options = ListenerOptions(tokens=TokenStore.of({"robots": (TOKEN, ["infer"])}))
    router = StubRouter(contract)
    with (
        loop_thread() as thread,
        serving(thread, lambda: OpenpiListener(router, options)) as port,
    ):
        python, arguments = client_python("openpi"), ("keys", str(port), TOKEN)
        text = run_client(python, "drive_openpi.py", *arguments, limit_s=60, folder=tmp_path)
    said = json.loads(text)
    for name in ("none", "wrong"):
        assert said[name].startswith("InvalidStatus"), said
        assert "401" in said[name]
    assert said["right"] == [HORIZON, 7]
