"""The adapter: load, prepare, and the four parts core runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from phyai import hub
from phyai.adapter import Adapter, AdapterArgs, draw_noise, is_integer, observations
from phyai.cache import Cache
from phyai.errors import CheckpointError, ConfigError
from phyai.layers import Placement
from phyai.request_values import checked, common_steps
from phyai.types import ActionChunk, BufferSpec, CacheSpec, Key, Prepared
from phyai.weights import LoadReport, load_pretrained, update_tensors
from torch import Tensor, nn

from my_policy.config import PolicyConfig
from my_policy.inputs import row_tensors
from my_policy.network import Encoder, FlowDenoiser

OPTIONS = ("seed", "noise", "num_steps")
MAX_STEPS = 1000


@dataclass
class PolicyArgs(AdapterArgs):
    """Arguments of plugin ``my_policy``.

    checkpoint_dir: folder or hub id with config.json and model.safetensors.
    """

    checkpoint_dir: str | Path | None = None
    max_batch_size: int = 1

    def __post_init__(self) -> None:
        if not is_integer(self.max_batch_size) or self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size must be at least 1; got {self.max_batch_size!r}.")


class PolicyAdapter(Adapter):
    """The policy behind the runtime."""

    name = "my_policy"
    args_cls = PolicyArgs

    args: PolicyArgs

    # ------------------------------------------------------------ weights

    def load(self) -> LoadReport:
        if self.args.checkpoint_dir is None:
            raise ConfigError("checkpoint_dir must be given; got None. Pass a folder or hub id.")
        folder = hub.resolve(self.args.checkpoint_dir)
        if not folder.is_dir():
            raise CheckpointError(f"checkpoint_dir must be a folder; got {folder}.")
        services = self.services
        self.policy = PolicyConfig.from_folder(folder)
        at = Placement(services.kernels, services.device, services.dtype)
        self.encoder = Encoder(self.policy, at)
        self.network = FlowDenoiser(self.policy, at)
        self.modules = nn.ModuleList([self.encoder, self.network])
        return load_pretrained(self.modules, folder, progress=services.progress)

    def update_weights(self, items: Iterable[tuple[str, Tensor]]) -> None:
        update_tensors(self.modules, items)

    def refresh(self) -> None:
        self.network.refresh()

    def dump_targets(self) -> Mapping[str, nn.Module]:
        return {"encoder": self.encoder, "network": self.network}

    def expects(self) -> Mapping[str, Any]:
        return {
            "cameras": (self.policy.camera,),
            "state_dim": self.policy.state_dim,
            "prompt": True,
        }

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        rows = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        each = [row_tensors(row, self.policy) for row in rows]
        tensors = {name: torch.stack([row[name] for row in each]) for name in each[0]}
        tensors["noise.action"] = torch.stack([self._noise(row.options) for row in rows])
        steps = common_steps([row.options for row in rows], self.policy.num_steps, MAX_STEPS)
        return Prepared(tensors, len(rows), Key(num_steps=steps), meta=rows)

    def _noise(self, options: Mapping[str, Any]) -> Tensor:
        """Return the noise of one row [H, A], given or drawn from the row's own seed."""
        shape = (self.policy.horizon, self.policy.action_dim)
        given = options.get("noise")
        if given is None:
            return draw_noise(shape, options.get("seed"))
        return checked("option noise", given, shape)

    # ------------------------------------------------------------ parts

    def denoiser(self) -> FlowDenoiser:
        return self.network

    def conditioning(self) -> PolicyConditioning:
        return PolicyConditioning(self.encoder, self.network)

    def cache(self) -> CacheSpec:
        return self._buffers

    def output(self) -> PolicyOutput:
        return PolicyOutput(self.policy)

    def _buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        return self.network.cache_buffers()


class PolicyConditioning:
    """Runs once per request: the image's K and V for every block, and the task."""

    def __init__(self, encoder: Encoder, network: FlowDenoiser) -> None:
        self.encoder, self.network = encoder, network

    def encode(self, cache: Cache) -> None:
        inputs = cache.inputs
        patches, task = self.encoder(
            inputs["image"], inputs["state"], inputs["tokens"], inputs["length"]
        )
        for i, keys in enumerate(self.network.image_keys(patches)):
            cache[f"image_kv.{i}"].copy_(keys)
        cache["task"].copy_(task)


class PolicyOutput:
    """Normalised actions -> robot units."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.mean = np.asarray(config.action_mean, dtype=np.float32)
        self.std = np.asarray(config.action_std, dtype=np.float32)

    def decode(self, x: dict[str, Tensor], cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        return [
            ActionChunk(
                actions=chunk * self.std + self.mean,
                names=self.config.action_names,
                mask=np.ones(len(chunk), dtype=bool),
                model_actions=chunk,
                control_hz=self.config.control_hz,
                units=self.config.action_units,
            )
            for chunk in x["action"].float().cpu().numpy()
        ]

    def tensors(self, x: dict[str, Tensor], cache: Cache, prepared: Prepared) -> Tensor:
        return x["action"]
