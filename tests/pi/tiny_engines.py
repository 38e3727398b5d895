"""Engines on the committed tiny checkpoints, and requests that fit them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from phyai import Engine, EngineArgs, EngineConfig, Observation
from phyai.engine_config import DeviceConfig, RuntimeConfig
from phyai.models.pi0.main_pi0 import PI0Args, PI0Request
from phyai.models.pi05.main_pi05 import PI05Args, PI05Request

GOLDEN = Path(__file__).parents[1] / "golden"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
PROMPTS = ("pick up the cup", "fold it", "open the top drawer and put the red block inside")
ARGS: dict[str, Any] = {"pi05": PI05Args, "pi0": PI0Args}
REQUESTS: dict[str, Any] = {"pi05": PI05Request, "pi0": PI0Request}
VOCAB = 64
"""Token ids below this are in the vocabulary of both tiny checkpoints."""


def open_engine(model: str, runtime: dict[str, Any] | None = None, **changes: Any) -> Engine:
    root = GOLDEN / model
    args = ARGS[model](
        **{
            "checkpoint_dir": str(root),
            "max_batch_size": 4,
            "precision": "fp32",
            "tokenizer": str(root / "tokenizer"),
            "processor_dir": str(root / "processors_abs"),
            **changes,
        }
    )
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype=torch.float32),
        runtime=RuntimeConfig(**(runtime or {})),
    )
    return Engine(EngineArgs(model, args, config))


def state_dim(engine: Engine) -> int:
    adapter: Any = engine.adapter
    return int(adapter.processor.state_dim)


def observation(engine: Engine, seed: int = 0, cameras: int = 2, **options: Any) -> Observation:
    random = np.random.default_rng(seed)
    sizes = ((56, 56), (48, 64), (70, 40))
    images = {
        name: random.integers(0, 256, (*sizes[i], 3), dtype=np.uint8)
        for i, name in enumerate(CAMERAS[:cameras])
    }
    return Observation(
        images=images,
        state=random.uniform(-1, 1, state_dim(engine)).astype(np.float32),
        prompt=PROMPTS[seed % len(PROMPTS)],
        options={"seed": seed, "num_steps": 2, **options},
    )


def model_request(
    engine: Engine, seed: int = 0, rows: int = 2, cameras: int = 2, **changes: Any
) -> Any:
    """Return a request whose rows have prompts of unequal length."""
    pi: Any = engine.adapter.pi  # type: ignore[attr-defined]
    random = torch.Generator().manual_seed(seed)
    width = 12
    size = pi.vision.image_size
    fields: dict[str, Any] = {
        "pixel_values": torch.rand(rows, cameras, 3, size, size, generator=random) * 2 - 1,
        "input_ids": torch.randint(1, VOCAB, (rows, width), generator=random),
        "lang_lens": torch.randint(1, width + 1, (rows,), generator=random),
        "noise": torch.randn(rows, pi.chunk_size, pi.max_action_dim, generator=random),
        "num_steps": 2,
    }
    if engine.args.plugin == "pi0":
        fields["state"] = torch.randn(rows, pi.max_state_dim, generator=random)
    return REQUESTS[engine.args.plugin](**{**fields, **changes})
