"""Turns two camera images, a state and an instruction into an action chunk, offline on a CPU.

    python examples/run_pi05.py

The small built-in checkpoint is made in the user's cache on the first run. For a real one pass
PI05Args(checkpoint_dir="org/name or folder") and your own Observation.
"""

from __future__ import annotations

import torch

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig
from phyai.env import cache_dir
from phyai.models.pi.presets import builders as presets
from phyai.models.pi05 import PI05Args


def main() -> None:
    preset = presets.tiny_pi05(cache_dir())
    config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))
    with Engine(EngineArgs("pi05", PI05Args(**preset), config)) as engine:
        chunk = engine.step(presets.sample_observation(preset))
    print(f"{chunk.horizon} actions in {chunk.timing['total']:.0f} ms; the first one:")
    for name, value in zip(chunk.names, chunk.actions[0], strict=True):
        print(f"  {name:<8} {value:+.3f}")


if __name__ == "__main__":
    main()
