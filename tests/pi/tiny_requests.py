"""Engines over the tiny golden checkpoints, and random model requests for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai import Engine, EngineArgs, EngineConfig
from phyai.models.pi.adapter import PiArgs, PiRequest
from phyai.models.pi.config import PiConfig
from phyai.models.pi0.main_pi0 import PI0Args, PI0Request
from phyai.models.pi05.main_pi05 import PI05Args, PI05Request
from tests.cpu_engines import cpu_config

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("pi0", "pi05")
CHUNK, ACTION_DIM, STATE_DIM, IMAGE, VOCAB, PATCHES, LAYERS = 10, 8, 6, 56, 512, 16, 3


def pi_args(model: str, **changes: Any) -> PiArgs:
    """Return arguments of the golden checkpoint of ``model``."""
    cls = PI0Args if model == "pi0" else PI05Args
    return cls(**{"checkpoint_dir": GOLDEN / model, "max_batch_size": 4, **changes})


def pi_config(model: str, *, layers: int | None = None, **changes: Any) -> PiConfig:
    """Return the golden checkpoint's config, with ``layers`` per stack when given."""
    config = PiConfig.from_folder(GOLDEN / model, "pi0" if model == "pi0" else "pi05")
    if layers is not None:
        config = replace(
            config,
            vision=replace(config.vision, num_hidden_layers=layers),
            text=replace(config.text, num_hidden_layers=layers),
            expert=replace(config.expert, num_hidden_layers=layers),
        )
    return replace(config, **changes)


@contextmanager
def engine_of(
    model: str, settings: EngineConfig | None = None, /, **changes: Any
) -> Iterator[Engine]:
    """Open an engine over the golden checkpoint of ``model``; float32 on the CPU by default."""
    with Engine(EngineArgs(model, pi_args(model, **changes), settings or cpu_config())) as engine:
        yield engine


def random_request(
    model: str,
    masks: Sequence[Sequence[bool]],
    lens: Sequence[int],
    *,
    pad_to: int | None = None,
    num_steps: int = 4,
    seed: int = 0,
    **fields: Any,
) -> PiRequest:
    """Return a request of ``len(lens)`` rows; masked cameras and padded tokens hold real noise.

    masks: per row, which cameras are valid.  lens: valid tokens per row; the rest, up to ``pad_to``
    (default: the longest), is padding.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, width = len(lens), pad_to or max(lens)
    mask = torch.tensor(masks)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 2.0 - 1.0

    values: dict[str, Any] = {
        "pixel_values": uniform(rows, mask.shape[1], 3, IMAGE, IMAGE),
        "image_masks": mask,
        "input_ids": torch.randint(3, VOCAB, (rows, width), generator=generator),
        "lang_lens": torch.tensor(lens),
        "noise": torch.randn(rows, CHUNK, ACTION_DIM, generator=generator),
        "num_steps": num_steps,
        **fields,
    }
    if model == "pi0":
        return PI0Request(**{"state": uniform(rows, STATE_DIM), **values})
    return PI05Request(**values)
