"""Engines over small random trackers of any sizes, and requests for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from phyai import Engine, EngineArgs, EngineConfig
from phyai.models.minicpm_robot_track import MiniCPMRobotTrackArgs, MiniCPMRobotTrackRequest
from phyai.models.minicpm_robot_track.presets.tiny_checkpoint import (
    CONFIG,
    tiny_weights,
    write_tiny_checkpoint,
)
from phyai.models.minicpm_robot_track.vision import write_tiny_towers
from phyai.types import Observation
from tests.cpu_engines import cpu_config
from tests.minicpm.track_reference import TrackReference

PLUGIN = "minicpm_robot_track"
PROMPT = "Follow the man in the red hat"


@contextmanager
def engine_of(
    folder: Path, settings: EngineConfig | None = None, /, **changes: Any
) -> Iterator[Engine]:
    """Open an engine over a checkpoint folder, with the towers in it if there are any."""
    given: dict[str, Any] = {"checkpoint_dir": str(folder), "max_batch_size": 4}
    if (folder / "dinov3").is_dir():
        given |= {"dino_dir": str(folder / "dinov3"), "siglip_dir": str(folder / "siglip")}
    args = MiniCPMRobotTrackArgs(**{**given, **changes})
    with Engine(EngineArgs(PLUGIN, args, settings or cpu_config())) as engine:
        yield engine


def write_tiny(folder: Path, *, towers: bool = False) -> Path:
    """Write the tiny preset's files into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_checkpoint(folder)
    if towers:
        write_tiny_towers(folder)
    return folder


def write_sized(
    folder: Path, changes: Mapping[str, Any], backbone: Mapping[str, Any], seed: int = 0
) -> Path:
    """Write a random checkpoint of other sizes, with the tiny preset's tokenizer."""
    write_tiny(folder)
    config = copy.deepcopy(CONFIG)
    config.update(changes)
    config["backbone_config"].update(backbone)
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config).items():
        values = torch.randn(shape, generator=random)
        if name.endswith("norm.weight") or len(shape) == 1:
            values = 0.1 * values + (1.0 if name.endswith("weight") else 0.0)
        elif not name.endswith(("embedding.weight", "control_query", "embed_tokens.weight")):
            values = values / shape[-1] ** 0.5
        tensors[name] = values
    save_file(tensors, folder / "model.safetensors")
    return folder


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint; its output scale is left out, as it may be."""
    sizes = config["backbone_config"]
    width, mlp = sizes["hidden_size"], sizes["intermediate_size"]
    keys = width // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {
        "backbone.embed_tokens.weight": (sizes["vocab_size"], width),
        "backbone.norm.weight": (width,),
        "temporal_markers.time_embedding.weight": (config["max_time_steps"], width),
        "temporal_markers.stream_embedding.weight": (2, width),
        "temporal_markers.camera_embedding.weight": (1, width),
        "control_query": (1, 1, width),
    }
    for i in range(sizes["num_hidden_layers"]):
        layer = f"backbone.layers.{i}"
        for leg, out in (("q", width), ("k", keys), ("v", keys), ("o", width)):
            found[f"{layer}.self_attn.{leg}_proj.weight"] = (out, width)
        for leg, shape in (("gate", (mlp, width)), ("up", (mlp, width)), ("down", (width, mlp))):
            found[f"{layer}.mlp.{leg}_proj.weight"] = shape
        for norm in ("input", "post_attention"):
            found[f"{layer}.{norm}_layernorm.weight"] = (width,)
    features = config["vision_feature_dim"]
    hidden = [width, *config["trajectory_hidden_dims"]]
    linears = {"vision_projector.layers.1": (width, features),
               "vision_projector.layers.3": (width, width)}  # fmt: skip
    vectors = {"vision_projector.layers.0": features, "trajectory_head.layers.0": width}
    for i, (into, out) in enumerate(pairwise(hidden)):
        linears[f"trajectory_head.layers.{1 + 3 * i}"] = (out, into)
    behind = 3 * len(hidden) - 2
    vectors[f"trajectory_head.layers.{behind}"] = hidden[-1]
    outputs = config["num_waypoints"] * config["action_dim"]
    linears[f"trajectory_head.layers.{behind + 1}"] = (outputs, hidden[-1])
    for name, (out, into) in linears.items():
        found |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    for name, size in vectors.items():
        found |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return found


def reference_of(folder: Path) -> TrackReference:
    config = json.loads((folder / "config.json").read_text())
    return TrackReference(config, load_file(folder / "model.safetensors"))


# ---------------------------------------------------------------- requests


@dataclass(frozen=True)
class Window:
    """Inputs of one row: ids [T], coarse [H, C, D], fine [F, D], times [H + 1]."""

    ids: Tensor
    coarse: Tensor
    fine: Tensor
    times: Tensor


def random_windows(config: Mapping[str, Any], text: Sequence[int], seed: int = 0) -> list[Window]:
    """Return one window per entry of ``text``, the tokens of its instruction."""
    random = torch.Generator().manual_seed(seed)
    history, features = config["history_frames"], config["vision_feature_dim"]
    coarse, fine = config["coarse_tokens_per_frame"], config["fine_tokens_current_frame"]
    vocab = config["backbone_config"]["vocab_size"]
    return [
        Window(
            torch.randint(0, vocab, (n,), generator=random),
            torch.randn(history, coarse, features, generator=random),
            torch.randn(fine, features, generator=random),
            torch.arange(history + 1),
        )
        for n in text
    ]


def request_of(rows: Sequence[Window], **changes: Any) -> MiniCPMRobotTrackRequest:
    """Return the rows as one request, shorter instructions padded on the right with token 1."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.ones(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        mask[i, : len(row.ids)] = 1
    first = rows[0]
    spread = first.coarse.shape[1], len(first.fine)
    times = torch.stack([row.times for row in rows])
    return MiniCPMRobotTrackRequest(
        **{
            "input_ids": ids,
            "attention_mask": mask,
            "coarse_tokens": torch.stack([row.coarse.flatten(0, 1) for row in rows]),
            "fine_tokens": torch.stack([row.fine for row in rows]),
            "coarse_time_indices": times[:, :-1].repeat_interleave(spread[0], dim=1),
            "fine_time_indices": times[:, -1:].repeat_interleave(spread[1], dim=1),
            **changes,
        }
    )


def expected(reference: TrackReference, rows: Sequence[Window]) -> Tensor:
    return torch.stack([reference.trajectory(r.ids, r.coarse, r.fine, r.times) for r in rows])


class Stream:
    """A made-up stream of features: frame t is always the same.

    dims: (coarse tokens, fine tokens, features).
    """

    def __init__(self, frames: int, dims: tuple[int, int, int] = (4, 16, 80), seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        coarse, fine, features = dims
        self.coarse = torch.randn(frames, coarse, features, generator=random)
        self.fine = torch.randn(frames, fine, features, generator=random)

    def row(self, first: int, last: int, prompt: str = PROMPT, **options: Any) -> Observation:
        """Return frames first .. last of it; ``last`` is the current one."""
        features = {"coarse_tokens": self.coarse[first : last + 1], "fine_tokens": self.fine[last]}
        return Observation(prompt=prompt, options={**features, **options})

    def step(self, t: int, session: str = "a", prompt: str = PROMPT) -> Observation:
        """Return frame t as request t of a session."""
        return self.row(t, t, prompt, session_id=session, seq=t)

    def window(self, t: int, history: int = 7, prompt: str = PROMPT) -> Observation:
        """Return everything that frame t's window holds, without a session."""
        return self.row(max(0, t - history + 1), t, prompt)


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """Return random frames uint8 [count, 112, 112, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, 112, 112, 3), dtype=np.uint8)


def update(engine: Engine, tensors: Mapping[str, Tensor]) -> None:
    """Give the engine new weights, as a trainer does."""
    engine.adapter.update_weights(tensors.items())
    engine.core.runner.refresh()


def tiny_tensors() -> dict[str, Tensor]:
    return {name: torch.from_numpy(array) for name, array in tiny_weights().items()}
