"""The tiny preset: random weights from a fixed seed, and an observation that fits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from correct_policy.model import STATE, Network

from phyai.types import Observation
from phyai.weights import save_safetensors


def tiny(cache_dir: Path, progress: Any = None) -> dict[str, Any]:
    folder = Path(cache_dir) / "toy-policy"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}": torch.randn(tensor.shape, generator=generator)
        for name, tensor in Network(torch.float32).state_dict().items()
    }
    save_safetensors(tensors, folder / "model.safetensors")
    return {"checkpoint_dir": str(folder)}


def sample(args: Mapping[str, Any]) -> Observation:
    random = np.random.default_rng(0)
    return Observation(
        images={"front": random.integers(0, 256, (6, 8, 3), dtype=np.uint8)},
        state=random.uniform(-1, 1, STATE).astype(np.float32),
        prompt="reach",
    )
