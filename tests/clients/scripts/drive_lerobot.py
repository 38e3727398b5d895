"""Runs in lerobot's environment: its unmodified RobotClient drives a stand-in robot.

Arguments: JSON of the settings below, OUT.npz. Prints "chunk" per chunk, and JSON as its last line.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import absent

absent.install()

import numpy as np  # noqa: E402
from lerobot.async_inference.configs import RobotClientConfig  # noqa: E402
from lerobot.async_inference.robot_client import RobotClient  # noqa: E402
from stand_in_arm import StandInArmConfig  # noqa: E402

LIMIT_S = 200.0


class Watched(RobotClient):
    """Keeps what passes; what the client does is the package's own."""

    def __init__(self, config: RobotClientConfig, keep: int) -> None:
        super().__init__(config)
        self.keep = keep
        self.sent: dict[float, Any] = {}
        self.sent_at: dict[float, float] = {}
        self.chunks: list[Any] = []
        self.acks: list[float] = []
        self.waits: list[float] = []

    def send_observation(self, obs: Any) -> bool:
        started = time.perf_counter()
        self.sent[obs.get_timestamp()] = obs
        self.sent_at[obs.get_timestamp()] = started
        done = super().send_observation(obs)
        if done:
            self.acks.append(time.perf_counter() - started)
        return done

    def _aggregate_action_queues(self, incoming_actions: Any, aggregate_fn: Any = None) -> None:
        now = time.perf_counter()
        super()._aggregate_action_queues(incoming_actions, aggregate_fn)
        self.chunks.append(incoming_actions)
        self.waits.append(now - self.sent_at[incoming_actions[0].get_timestamp()])
        print("chunk", flush=True)
        if len(self.chunks) >= self.keep:
            self.shutdown_event.set()


def main(settings: dict[str, Any], out: str) -> dict[str, Any]:
    robot = StandInArmConfig(
        id="stand-in",
        calibration_dir=Path.cwd(),
        joints=settings["joints"],
        moved=settings["moved"],
        sizes={name: tuple(size) for name, size in settings["cameras"].items()},
    )
    config = RobotClientConfig(
        robot=robot,
        policy_type="pi05",
        pretrained_name_or_path=settings["policy"],
        actions_per_chunk=settings["actions_per_chunk"],
        server_address=f"127.0.0.1:{settings['port']}",
        task=settings["task"],
        chunk_size_threshold=settings["threshold"],
    )
    client = Watched(config, settings["chunks"])
    assert client.start(), "the handshake failed"
    stop = threading.Timer(LIMIT_S, client.shutdown_event.set)
    stop.start()
    receiver = threading.Thread(target=client.receive_actions, daemon=True)
    receiver.start()
    try:
        client.control_loop(task=config.task)
    finally:
        stop.cancel()
        client.stop()
        receiver.join(10)
    np.savez(out, **arrays(client, settings["cameras"]))
    return {
        "chunks": len(client.chunks),
        "sent": len(client.sent),
        "performed": len(client.robot.performed),
        "steps": [[a.get_timestep() for a in chunk] for chunk in client.chunks],
        "times": [[a.get_timestamp() for a in chunk] for chunk in client.chunks],
        "types": sorted({str(a.get_action().dtype) for c in client.chunks for a in c}),
        "observed_at": [
            client.sent[chunk[0].get_timestamp()].get_timestep() for chunk in client.chunks
        ],
        "ack_ms": quantiles(client.acks),
        "chunk_ms": quantiles(client.waits),
    }


def arrays(client: Watched, cameras: Any) -> dict[str, Any]:
    """Return every chunk, and the observation it answers."""
    found = {}
    for index, chunk in enumerate(client.chunks):
        seen = client.sent[chunk[0].get_timestamp()].get_observation()
        joints = [float(v) for name, v in seen.items() if name.endswith(".pos")]
        found[f"{index}/state"] = np.asarray(joints)
        found[f"{index}/actions"] = np.stack([action.get_action().numpy() for action in chunk])
        found |= {f"{index}/{name}": seen[name] for name in cameras}
    return found


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: round(1e3 * ordered[int(share * (len(ordered) - 1))], 3)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.WARNING)
    print(json.dumps(main(json.loads(sys.argv[1]), sys.argv[2])))
