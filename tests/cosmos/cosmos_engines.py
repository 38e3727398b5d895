"""Engines over the tiny golden checkpoint, and requests that fit it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from phyai import Engine, EngineArgs, EngineConfig
from phyai.models.cosmos3.main_cosmos3 import (
    Cosmos3ActionRequest,
    Cosmos3Args,
    Cosmos3PolicyArgs,
    Cosmos3T2VRequest,
)
from phyai.types import Observation
from tests.conftest import GOLDEN
from tests.cpu_engines import cpu_config

ROOT = GOLDEN / "cosmos3"
POLICY, GENERATION = "cosmos3_policy", "cosmos3"
CHANNELS, SOUND, ACTION, DOMAINS, VOCAB = 8, 6, 16, 12, 272
LATENT = (3, 4, 6)
CHUNK = 8


def policy_args(**changes: Any) -> Cosmos3PolicyArgs:
    """Return arguments whose observations are small: chunk 8, the smallest canvas."""
    given = {"checkpoint_dir": str(ROOT), "max_batch_size": 4, "chunk_size": CHUNK}
    return Cosmos3PolicyArgs(**{**given, "resolution": "256", "resize_image": False, **changes})


def generation_args(**changes: Any) -> Cosmos3Args:
    return Cosmos3Args(**{"checkpoint_dir": str(ROOT), "max_batch_size": 4, **changes})


@contextmanager
def engine_of(
    plugin: str, settings: EngineConfig | None = None, /, **changes: Any
) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint; float32 on the CPU by default."""
    args = policy_args(**changes) if plugin == POLICY else generation_args(**changes)
    with Engine(EngineArgs(plugin, args, settings or cpu_config())) as engine:
        yield engine


def ids(count: int, rows: int = 1, *, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, count), generator=random)


def action_request(rows: int = 1, **changes: Any) -> Cosmos3ActionRequest:
    """Return a policy request with a state row, of latents; guided, two steps."""
    random = torch.Generator().manual_seed(7)
    given: dict[str, Any] = {
        "text_ids": ids(9, rows),
        "neg_text_ids": ids(5, rows, seed=1),
        "video_shape": LATENT,
        "fps": 15.0,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "flow_shift": 5.0,
        "schedule": "native",
        "seed": 0,
        "domain_id": 8,
        "action_chunk": CHUNK + 1,
        "raw_action_dim": 8,
        "cond_video_latents": torch.randn(rows, CHANNELS, *LATENT, generator=random),
        "cond_action": torch.randn(rows, 1, 8, generator=random),
        "cond_action_indexes": (0,),
        "action_start_frame_offset": 0,
    }
    return Cosmos3ActionRequest(**{**given, **changes})


def video_request(rows: int = 1, **changes: Any) -> Cosmos3T2VRequest:
    """Return a text-to-video request; guided, two steps."""
    given: dict[str, Any] = {
        "text_ids": ids(9, rows),
        "neg_text_ids": ids(5, rows, seed=1),
        "video_shape": LATENT,
        "num_inference_steps": 2,
        "guidance_scale": 3.0,
        "seed": 0,
    }
    return Cosmos3T2VRequest(**{**given, **changes})


def observation(seed: int = 0, **changes: Any) -> Observation:
    """Return what a small DROID robot sees: one composed image of 96 x 128 pixels."""
    random = np.random.default_rng(seed)
    image = random.integers(0, 256, (96, 128, 3), dtype=np.uint8)
    state = random.normal(size=8).astype(np.float32)
    options = {"seed": seed, "num_steps": 2}
    given = {"images": {"image": image}, "state": state, "prompt": "pick up the cup"}
    return Observation(**{**given, "options": options, **changes})


def prompt(seed: int = 0, **options: Any) -> Observation:
    """Return a prompt for a tiny video: 5 frames of 32 x 48 pixels, two steps."""
    small = {"num_frames": 5, "height": 32, "width": 48, "num_steps": 2, "fps": 24.0}
    return Observation(prompt="a red cube", options={**small, "seed": seed, **options})
