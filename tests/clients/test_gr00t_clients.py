"""GR00T clients of three generations over real sockets, against a gateway and two servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phyai.engine import Engine
from phyai.types import Observation
from phyai_gateway.contract import ModelContract
from phyai_gateway.protocols.base import ListenerOptions
from phyai_gateway.protocols.gr00t import Gr00tListener
from phyai_gateway.server import config as server_config
from phyai_gateway.tokens import TokenStore
from tests.clients.fleet import Fleet, run_client
from tests.clients.models import mirrored
from tests.gateway.stub_router import StubRouter, loop_thread, serving

pytestmark = pytest.mark.slow

TOKEN = "a-token-that-is-long-enough"
TASK = "stack the cups"
MARKS = {
    "a": "__ModalityConfig_class__",
    "b": "__ModalityConfig_class__",
    "c": "__ModalityConfig__",
}


class Drive:
    """Runs a client against one of the fleet's listeners."""

    def __init__(self, python: Path, fleet: Fleet, folder: Path) -> None:
        self.python, self.fleet, self.folder = python, fleet, folder

    def __call__(
        self, listener: str, generation: str, rows: int, widths: dict[str, int]
    ) -> tuple[dict[str, Any], Any]:
        port = self.fleet.ports[listener]
        out = self.folder / "seen.npz"
        arguments = (str(rows), generation, str(port), str(out), json.dumps(widths))
        script = "drive_gr00t.py"
        text = run_client(self.python, script, *arguments, limit_s=120, folder=self.folder)
        said = json.loads(text)
        _check_endpoints(said, generation)
        return said, np.load(out)


@pytest.fixture
def drive(fleet: Fleet, client_python: Callable[[str], Path], tmp_path: Path) -> Drive:
    return Drive(client_python("gr00t"), fleet, tmp_path)


def _check_endpoints(said: dict[str, Any], generation: str) -> None:
    running = {"status": "ok", "message": "Server is running"}
    assert said["ping"] == said["alive"] == running
    assert said["reset"] == said["kill"] == {}
    # Asked first, by a client that has shown nothing of itself, the answer suits the later two.
    assert MARKS[generation] in said["first_marks"]
    assert said["marks"] == [MARKS[generation]]
    assert said["same"]
    assert said["after"]
    for text, part in zip(said["errors"], ("video", "state", "observation"), strict=True):
        assert text.startswith("Server error: invalid_argument:"), said["errors"]
        assert part in text
        assert "Traceback" not in text


@pytest.mark.parametrize(("generation", "rows"), [("a", 1), ("b", 1), ("b", 3), ("c", 1), ("c", 2)])
def test_every_generation(drive: Drive, generation: str, rows: int) -> None:
    widths = {"arm": 5, "gripper": 1}
    # The oldest generation reads no other form of its first question: its listener is told.
    listener = "gr00t_arm_a" if generation == "a" else "gr00t_arm"
    said, seen = drive(listener, generation, rows, widths)
    lead = [] if generation == "a" else [rows]
    prefix = "action." if generation == "a" else ""
    assert said["forms"] == {
        f"{prefix}{key}": ["<f4", [*lead, 16, width]] for key, width in widths.items()
    }
    for turn in range(3):
        for row in range(rows):
            wanted = mirrored(_observation(seen, turn, row, generation, widths), 16, 6)
            got = {k: seen[f"{turn}/got/{prefix}{k}"] for k in widths}
            if generation != "a":
                got = {key: value[row] for key, value in got.items()}
            assert np.array_equal(got["gripper"], wanted[:, :1])
            assert np.array_equal(got["arm"], wanted[:, 1:])
    assert min(drive.fleet.answered("gr00t_arm")) > 0


@pytest.mark.parametrize(
    ("model", "generation", "rows"),
    [
        ("gr00t", "b", 1),
        ("gr00t", "c", 2),
        ("gr00t_frames", "a", 1),
        ("gr00t_frames", "b", 2),
        ("gr00t_frames", "c", 1),
    ],
)
def test_a_real_engine(drive: Drive, model: str, generation: str, rows: int) -> None:
    """GR00T's small checkpoint; the second robot looks at two frames of each camera."""
    loaded = server_config.load(drive.fleet.files[model])
    with Engine(loaded.args) as engine:
        described = engine.adapter.expects()
        told = described["embodiments"][described["embodiment"]]
        said, seen = drive(model, generation, rows, dict(told["state"]))
        steps = said["modality"]["video"]["delta_indices"]
        assert steps == list(told["frames"]) == ([-15, 0] if model == "gr00t_frames" else [0])
        prefix = "action." if generation == "a" else ""
        for row in range(rows):
            observation = _observation(seen, 0, row, generation, told["state"])
            wanted, start = engine.step(observation).actions, 0
            for key, width in told["actions"].items():
                got = seen[f"0/got/{prefix}{key}"]
                got = got if generation == "a" else got[row]
                columns = wanted[:, start : start + width]
                assert np.allclose(got, columns, atol=1e-5), key  # other rows may share a batch
                start += width


def _observation(seen: Any, turn: int, row: int, generation: str, widths: Any) -> Observation:
    prefix = f"{turn}/sent/"
    sent = {k.removeprefix(prefix): seen[k] for k in seen.files if k.startswith(prefix)}
    if generation != "a":
        sent = {key: value[row] for key, value in sent.items()}
    frames = {k.removeprefix("video."): v for k, v in sent.items() if k.startswith("video.")}
    images = {key: value[0] if len(value) == 1 else value for key, value in frames.items()}
    state = np.concatenate([sent[f"state.{key}"][0] for key in widths])
    return Observation(images, state, TASK)


def test_tokens(client_python: Callable[[str], Path], tmp_path: Path) -> None:
    """A protected listener: no token, a wrong one, the right one."""
    options = ListenerOptions(tokens=TokenStore.of({"robots": (TOKEN, ["infer"])}))
    router, python = StubRouter(ModelContract("arm")), client_python("gr00t")
    with loop_thread() as thread, serving(thread, lambda: Gr00tListener(router, options)) as port:
        for generation in "abc":
            arguments = ("tokens", generation, str(port), TOKEN)
            text = run_client(python, "drive_gr00t.py", *arguments, limit_s=60, folder=tmp_path)
            said = json.loads(text)
            assert said["none"] == said["wrong"], said
            assert said["wrong"] == "Server error: Unauthorized: Invalid API token"
            assert "Server is running" in said["right"]
