"""Environments of the clients, and the servers and the gateway that they talk to."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients import models
from tests.clients.environments import python_of
from tests.clients.fleet import Fleet, model_file, preset_args
from tests.core.toy_adapter import registry

SLOTS = ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"]
DROID = {"cameras": SLOTS[:2], "state_dim": 8, "action_dim": 8, "horizon": 10}
ALOHA = {"cameras": SLOTS, "state_dim": 14, "action_dim": 14, "horizon": 50}
SO101 = {"cameras": SLOTS[:2], "state_dim": 6, "action_dim": 6, "horizon": 50}
ARM = {
    "cameras": ["front", "wrist"],
    "frames": [0],
    "state": {"arm": 5, "gripper": 1},
    "actions": {"gripper": 1, "arm": 5},
}
GR00T_ARM = {
    "cameras": ARM["cameras"],
    "state_dim": 6,
    "action_dim": 6,
    "horizon": 16,
    "extra": {"embodiment": "arm", "embodiments": {"arm": ARM}},
}
TWO_FRAMES = "oxe_droid_relative_eef_relative_joint"


@pytest.fixture(scope="session")
def client_python(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """Return what gives the interpreter of a client's environment."""
    cache = getattr(pytestconfig, "cache", None)
    if cache is None:  # pytest runs without it: nothing is kept
        folder = Path(tempfile.gettempdir()) / "phyai-clients"
        folder.mkdir(mode=0o700, exist_ok=True)
    else:
        folder = Path(cache.mkdir("clients"))
    return lambda name: python_of(name, folder)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Every model on two server processes, and a listener for each kind of client.

    Its tests may restart the gateway, and leave both servers as they are.
    """
    folder = tmp_path_factory.mktemp("fleet")
    tiny = preset_args("gr00t_n17", max_batch_size=2)
    files = [
        model_file(folder, "libero", "seeded_pi05", preset_args("pi05")),
        model_file(folder, "droid", "mirror", DROID),
        model_file(folder, "aloha", "mirror", ALOHA),
        model_file(folder, "so101", "mirror", SO101),
        model_file(folder, "gr00t_arm", "mirror", GR00T_ARM),
        model_file(folder, "gr00t", "seeded_gr00t", tiny),
        model_file(folder, "gr00t_frames", "seeded_gr00t", tiny | {"embodiment": TWO_FRAMES}),
    ]
    renames = f"camera.front={SLOTS[0]},camera.wrist={SLOTS[1]}"
    listeners = {
        "openpi": "openpi=127.0.0.1:{port},model=libero",
        "lerobot": f"lerobot=127.0.0.1:{{port}},{renames}",
        "gr00t": "gr00t=127.0.0.1:{port},model=gr00t",
        "gr00t_arm": "gr00t=127.0.0.1:{port},model=gr00t_arm",
        "gr00t_arm_a": "gr00t=127.0.0.1:{port},model=gr00t_arm,dialect=a",
        "gr00t_frames": "gr00t=127.0.0.1:{port},model=gr00t_frames",
    }
    with registry():  # engines of the tests themselves know the models, too
        models.register()
        made = Fleet(folder, files, listeners)
        try:
            yield made
        finally:
            made.close()
