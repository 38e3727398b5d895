"""A long stream of frames through MiniCPM-RobotTrack: does a step cost the same at the end?

python benchmarks/track_stream.py                          500 frames, the tiny preset, from pixels
python benchmarks/track_stream.py --size middle            4 decoder layers of the released widths

Prints the time ratio of the last to the first hundred frames, the work counted per frame, and how
much faster a step of a session is than computing its window from scratch: both in turns, after
their waypoints were found equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig
from phyai.models.minicpm_robot_track import MiniCPMRobotTrackArgs, MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.presets.builders import (
    full_random_minicpm_robot_track,
    tiny_minicpm_robot_track,
)
from phyai.models.minicpm_robot_track.presets.sample_scene import PROMPT
from phyai.types import Observation

TOLERANCE = 1e-4
HUNDRED = 100


def engine_args(size: str, folder: Path) -> tuple[MiniCPMRobotTrackArgs, bool]:
    """Return the adapter's arguments, and whether they include vision towers."""
    if size == "tiny":
        return MiniCPMRobotTrackArgs(**tiny_minicpm_robot_track(folder)), True
    args = MiniCPMRobotTrackArgs(**full_random_minicpm_robot_track(folder))
    if size == "full":
        return replace(args, precision="fp32"), True
    released = MiniCPMRobotTrackConfig.released()
    config = replace(released, backbone=replace(released.backbone, num_hidden_layers=4))
    return replace(args, precision="fp32", towers_random=False, config=config), False


class Frames:
    """Frame t of a made-up stream, as an image or as features; equal on every call."""

    def __init__(self, config: MiniCPMRobotTrackConfig, pixels: bool) -> None:
        self.config, self.pixels = config, pixels

    def observation(self, first: int, last: int, **options: Any) -> Observation:
        times = range(first, last + 1)
        if self.pixels:
            frames = np.stack([self._image(t) for t in times])
            return Observation({"front": frames}, prompt=PROMPT, options=options)
        coarse = torch.stack(
            [self._features(t, self.config.coarse_tokens_per_frame) for t in times]
        )
        fine = self._features(-last, self.config.fine_tokens_current_frame)
        features = {"coarse_tokens": coarse, "fine_tokens": fine}
        return Observation(prompt=PROMPT, options={**features, **options})

    def window(self, t: int) -> Observation:
        """Return frame t with all its history and without a session."""
        return self.observation(max(0, t - self.config.kept_frames + 1), t)

    def _image(self, t: int) -> np.ndarray:
        return np.random.default_rng(t).integers(0, 256, (240, 320, 3), dtype=np.uint8)

    def _features(self, t: int, tokens: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(t % 2**31)
        return torch.randn(tokens, self.config.vision_feature_dim, generator=random)


def stream(engine: Engine, frames: Frames, count: int) -> dict[str, Any]:
    """Run the stream; return seconds per frame, counted work and bytes."""
    counters = engine.core.services.profile.counters
    seconds, work, sizes = [], Counter[str](), set()
    for t in range(count):
        request = frames.observation(t, t, session_id="stream", seq=t)
        before, began = dict(counters), time.perf_counter()
        engine.step(request)
        seconds.append(time.perf_counter() - began)
        if t:
            done = {n: v - before.get(n, 0) for n, v in sorted(counters.items())}
            work[json.dumps({n: v for n, v in done.items() if v})] += 1
            sizes.add(engine.core.services.memory.nbytes)
    return {"seconds": seconds, "work": work, "sizes": sizes}


def compare(engine: Engine, frames: Frames, first: int, pairs: int) -> dict[str, Any]:
    """Return the times of steps and of whole windows, taken in turns."""
    steps, wholes, worst = [], [], 0.0
    for t in range(first, first + pairs + 1):
        step = frames.observation(t, t, session_id="stream", seq=t)
        whole = frames.window(t)
        results, took = [], []
        for request in (step, whole):
            began = time.perf_counter()
            results.append(engine.step(request).actions)
            took.append(time.perf_counter() - began)
        worst = max(worst, float(np.abs(results[0] - results[1]).max()))
        if worst > TOLERANCE:
            raise SystemExit(f"waypoints must agree within {TOLERANCE}; frame {t}: {worst:.2e}")
        if t > first:  # the first window may compile or allocate
            steps.append(took[0])
            wholes.append(took[1])
    return {"steps": steps, "wholes": wholes, "error": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--size", choices=("tiny", "middle", "full"), default="tiny")
    parser.add_argument("--frames", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args()
    if given.frames < 2 * HUNDRED:
        parser.error(f"--frames must be at least {2 * HUNDRED}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        args, pixels = engine_args(given.size, Path(folder))
        settings = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))
        with Engine(EngineArgs("minicpm_robot_track", args, settings)) as engine:
            frames = Frames(engine.adapter.track, pixels)  # type: ignore[attr-defined]
            done = stream(engine, frames, given.frames)
            pairs = compare(engine, frames, given.frames, given.pairs)
    ms = [1e3 * s for s in done["seconds"]]
    early, late = statistics.median(ms[:HUNDRED]), statistics.median(ms[-HUNDRED:])
    source = "pixels" if pixels else "features"
    print(f"{given.size}, from {source}, fp32, one thread, {given.frames} frames")
    print(
        f"median of the first hundred {early:.2f} ms, of the last {late:.2f} ms: {late / early:.3f}"
    )
    for work, times in done["work"].most_common():
        print(f"work of {times} frames: {work}")
    print(f"bytes of all buffers: {sorted(done['sizes'])}")
    step, whole = (1e3 * statistics.median(pairs[name]) for name in ("steps", "wholes"))
    print(
        f"step {step:.2f} ms, whole window {whole:.2f} ms: {whole / step:.2f} x "
        f"({given.pairs} pairs in turns, largest difference {pairs['error']:.1e})"
    )


if __name__ == "__main__":
    main()
