"""The smallest adapter there is: load, prepare, denoiser with the Direct solver, and an output."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from phyai import hub
from phyai.adapter import Adapter, AdapterArgs, is_integer, observations
from phyai.cache import Cache
from phyai.errors import ConfigError, RequestError
from phyai.layers import Placement
from phyai.solver import Direct
from phyai.types import ActionChunk, Key, Observation, Prepared
from phyai.weights import LoadReport, load_pretrained
from torch import Tensor
from torch.nn import functional

from act_policy.network import ACT, ACTConfig

CAMERA, CONTROL_HZ = "top", 50.0


@dataclass
class ACTArgs(AdapterArgs):
    """Arguments of plugin ``act``: a folder or hub id with config.json and model.safetensors."""

    checkpoint_dir: str | Path | None = None
    max_batch_size: int = 1

    def __post_init__(self) -> None:
        if not is_integer(self.max_batch_size) or self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size must be at least 1; got {self.max_batch_size!r}.")


class ACTAdapter(Adapter):
    """Action chunking with transformers, by regression."""

    name = "act"
    args_cls = ACTArgs

    args: ACTArgs

    def load(self) -> LoadReport:
        if self.args.checkpoint_dir is None:
            raise ConfigError("checkpoint_dir must be given; got None. Pass a folder or hub id.")
        folder = hub.resolve(self.args.checkpoint_dir)
        services = self.services
        self.sizes = ACTConfig.from_folder(folder)
        at = Placement(services.kernels, services.device, services.dtype)
        self.network = ACT(self.sizes, at)
        return load_pretrained(self.network, folder, progress=services.progress)

    def prepare(self, request: Any) -> Prepared:
        rows = observations(request, max_rows=self.args.max_batch_size, options=())
        shape = (len(rows), self.sizes.horizon, self.sizes.action_dim)
        tensors = {
            "image": torch.stack([self._image(row) for row in rows]),
            "state": torch.stack([self._state(row) for row in rows]),
            "noise.action": torch.zeros(shape),  # x has to be somewhere; Direct replaces it
        }
        return Prepared(tensors, len(rows), Key(), meta=rows)

    def denoiser(self) -> ACT:
        return self.network

    def solver(self) -> Direct:
        return Direct()

    def output(self) -> ACTOutput:
        return ACTOutput()

    def _image(self, row: Observation) -> Tensor:
        """Return [3, S, S] float32 in [-1, 1]."""
        if sorted(row.images) != [CAMERA]:
            raise RequestError(
                f"images must be those of camera {CAMERA!r}; got {sorted(row.images)}."
            )
        image = np.asarray(row.images[CAMERA])
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
            raise RequestError(
                f"image {CAMERA!r} must be uint8 [height, width, 3]; got {image.dtype} "
                f"{list(image.shape)}."
            )
        pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1.0
        size = (self.sizes.image_size, self.sizes.image_size)
        return functional.interpolate(pixels, size, mode="bilinear", antialias=True)[0]

    def _state(self, row: Observation) -> Tensor:
        """Return [D] float32, the joint positions as they are."""
        try:
            state = np.asarray(row.state, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise RequestError(f"state must be numbers; got {row.state!r}.") from error
        if state.shape != (self.sizes.state_dim,) or not np.isfinite(state).all():
            raise RequestError(
                f"state must be {self.sizes.state_dim} finite numbers; got {row.state!r}."
            )
        return torch.from_numpy(state.copy())


class ACTOutput:
    """Joint targets, named; the policy's own space is radians, so nothing is scaled."""

    def decode(self, x: dict[str, Tensor], cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        return [
            ActionChunk(
                actions=chunk,
                names=tuple(f"joint_{i}" for i in range(chunk.shape[1])),
                mask=np.ones(len(chunk), dtype=bool),
                model_actions=chunk.copy(),
                control_hz=CONTROL_HZ,
                units=("rad",) * chunk.shape[1],
            )
            for chunk in x["action"].float().cpu().numpy()
        ]

    def tensors(self, x: dict[str, Tensor], cache: Cache, prepared: Prepared) -> Tensor:
        return x["action"]
