"""Tiny checkpoints and CPU engines of both models, for tests that run the public path."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phyai import DeviceConfig, Engine, EngineArgs, EngineConfig
from phyai.models.pi.presets import builders as presets
from phyai.types import Observation

MODELS = ("pi05", "pi0")
CPU_FP32 = EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32))


def tiny_args(model: str, cache_dir: Path) -> dict[str, Any]:
    build = {"pi05": presets.tiny_pi05, "pi0": presets.tiny_pi0}[model]
    return build(cache_dir, None)


def open_engine(model: str, **args: Any) -> Engine:
    module = importlib.import_module(f"phyai.models.{model}.main_{model}")
    return Engine(EngineArgs(model, getattr(module, f"{model.upper()}Args")(**args), CPU_FP32))


def chunk(engine: Engine, observation: Observation) -> NDArray[np.float32]:
    return np.asarray(engine.step(observation).actions)
