"""The adapter of MiniCPM-RobotManip: load, prepare, and the parts core runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from phyai import hub
from phyai.adapter import Adapter, draw_noise, observations
from phyai.cache import Cache
from phyai.errors import CheckpointError, RequestError
from phyai.layers import Placement
from phyai.models.minicpm.precision import choose_dtype
from phyai.models.minicpm_robot.args import MiniCPMRobotArgs
from phyai.models.minicpm_robot.checkpoint import MiniCPMRobotWeights
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.network.denoiser import MiniCPMDenoiser
from phyai.models.minicpm_robot.network.prefix import Prefix, RowShape
from phyai.models.minicpm_robot.processing.processor import MiniCPMRow, Processor
from phyai.models.minicpm_robot.request import MAX_STEPS, HostRow, MiniCPMRobotRequest, assemble
from phyai.models.minicpm_robot.request_rows import request_rows
from phyai.models.minicpm_robot.solver import CleanResample
from phyai.request_values import checked, common_steps
from phyai.types import (
    ActionChunk,
    BufferSpec,
    CacheSpec,
    Conditioning,
    Denoiser,
    Key,
    Observation,
    Output,
    Prepared,
    Solver,
)
from phyai.weights import update_tensors

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.types import Tensors
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")

OPTIONS = ("seed", "noise", "num_steps", "contract", "embodiment_id")


class MiniCPMRobotAdapter(Adapter):
    """One MiniCPM-RobotManip checkpoint behind the runtime; every embodiment in one engine."""

    name = "minicpm_robot"
    args_cls = MiniCPMRobotArgs

    args: MiniCPMRobotArgs

    def __init__(self, args: MiniCPMRobotArgs, config: EngineConfig, services: Services) -> None:
        super().__init__(args, config, services)
        self.dtype = choose_dtype(args.precision, services.dtype)

    # ------------------------------------------------------------ weights

    def load(self) -> LoadReport | None:
        args, services = self.args, self.services
        folder = self._folder()
        model = args.config
        if model is None:
            model = (
                MiniCPMRobotConfig.from_folder(folder, args.weight_remap)
                if folder
                else MiniCPMRobotConfig()
            )
        if args.num_steps is not None:
            head = replace(model.head, num_inference_timesteps=args.num_steps)
            model = replace(model, head=head)
        self.model = model
        self.processor = Processor.from_checkpoint(
            folder,
            model,
            contract=args.contract,
            embodiment_id=args.embodiment_id,
            tokenizer=args.tokenizer,
            processor_dir=args.processor_dir,
            max_text_tokens=args.max_text_tokens,
        )
        # In low precision faster kernels may keep more bits than the official code does.
        rounding = "official" if self.dtype == torch.float32 else "free"
        at = Placement(services.kernels, services.device, self.dtype, rounding)
        self.prefix = Prefix(model, at, services.profile, embedding_in_file=args.embedding_in_file)
        self.network = MiniCPMDenoiser(
            model.head, at.with_dtype(args.head_dtype()), services.profile
        )
        self.modules = nn.ModuleDict({"prefix": self.prefix, "expert": self.network})
        self.weights = MiniCPMRobotWeights(model, args, folder)
        report = self.weights.load_into(self.modules, self.dtype, services.progress)
        for warning in self.processor.warnings:
            log.warning("plugin %s: %s", self.name, warning)
        return report

    def _folder(self) -> Path | None:
        if self.args.checkpoint_dir is None:
            return None
        folder = hub.resolve(self.args.checkpoint_dir, revision=self.args.revision)
        if folder.is_file():
            raise CheckpointError(
                f"checkpoint_dir must be a folder or hub id; got the file {folder}. "
                "Pass its folder."
            )
        return folder

    def refresh(self) -> None:
        self.network.refresh()

    def update_weights(self, items: Mapping[str, Tensor] | Any) -> None:
        update_tensors(self.modules, items, remap=self.weights.updated_name)

    def dump_targets(self) -> Mapping[str, nn.Module]:
        return {"prefix": self.prefix, "expert": self.network}

    def expects(self) -> Mapping[str, Any]:
        return self.processor.expects()

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, MiniCPMRobotRequest):
            rows = request_rows(self.model, self.args, request, self._default_embodiment())
            return self._assemble(rows, request.num_steps, None)
        _refuse_rtc(request)
        try:
            seen = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        except TypeError as error:
            raise TypeError(
                f"plugin {self.name!r} takes an Observation, a list of them or "
                f"MiniCPMRobotRequest; got {type(request).__name__}."
            ) from error
        default = self.model.head.num_inference_timesteps
        steps = common_steps([row.options for row in seen], default, MAX_STEPS)
        done = tuple(self.processor.row(row) for row in seen)
        rows = [self._host_row(row, made) for row, made in zip(seen, done, strict=True)]
        return self._assemble(rows, steps, done)

    def _assemble(
        self, rows: Sequence[HostRow], num_steps: int | None, meta: tuple[MiniCPMRow, ...] | None
    ) -> Prepared:
        most = self.args.max_text_tokens
        return assemble(self.model, rows, num_steps=num_steps, max_text=most, meta=meta)

    def _default_embodiment(self) -> int:
        given = self.args.embodiment_id
        return self.processor.contract().embodiment_id if given is None else given

    def _host_row(self, observation: Observation, row: MiniCPMRow) -> HostRow:
        options, head = observation.options, self.model.head
        shape = (head.action_horizon, head.action_dim)
        noise = options.get("noise")
        return HostRow(
            tokens=torch.as_tensor(row.input_ids).long(),
            grids=tuple((int(h), int(w)) for h, w in row.grids),
            pixels=torch.as_tensor(row.pixel_values),
            state=torch.as_tensor(row.state).flatten(),
            embodiment=row.embodiment_id,
            noise=draw_noise(shape, options.get("seed"))
            if noise is None
            else checked("option noise", noise, shape),
        )

    # ------------------------------------------------------------ parts

    def denoiser(self) -> Denoiser:
        return self.network

    def solver(self) -> Solver:
        return CleanResample()

    def conditioning(self) -> Conditioning:
        return MiniCPMRobotConditioning(self)

    def cache(self) -> CacheSpec:
        return self._buffers

    def output(self) -> Output:
        return MiniCPMRobotOutput(self.processor, self.args)

    def _buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        shape = RowShape.of(key, self.model)
        return {**self.prefix.cache_buffers(shape), **self.network.cache_buffers(shape.tokens)}


class MiniCPMRobotConditioning:
    """Packs the batch on the host, then runs the backbone and fills what the steps read."""

    def __init__(self, adapter: MiniCPMRobotAdapter) -> None:
        self.adapter = adapter

    def plan(self, cache: Cache, batch: Prepared) -> None:
        adapter = self.adapter
        static = adapter.services.graphs.static_shapes
        shape = RowShape.of(cache.key, adapter.model)
        plan = adapter.prefix.load_plan(cache, batch, shape, static=static)
        cross = adapter.network.load_plan(cache, plan.lens, static=static)
        cache.plan = replace(plan, cross=cross)

    def encode(self, cache: Cache) -> None:
        features = self.adapter.prefix.encode(cache)
        with self.adapter.services.profile.stage("head"):
            self.adapter.network.encode(cache, features)


class MiniCPMRobotOutput:
    """The unified layout -> the contract's channels, row by row."""

    def __init__(self, processor: Processor, args: MiniCPMRobotArgs) -> None:
        self.processor, self.control_hz = processor, args.control_hz

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        if prepared.meta is None:
            raise RequestError("a model request has no robot units; ask for its tensors.")
        model = x["action"].float().cpu().numpy()
        return [self._chunk(chunk, row) for chunk, row in zip(model, prepared.meta, strict=True)]

    def _chunk(self, model: np.ndarray, row: MiniCPMRow) -> ActionChunk:
        actions, names, units = self.processor.decode(model, row)
        return ActionChunk(
            actions=actions,
            names=names,
            mask=np.ones(len(actions), dtype=bool),
            model_actions=model,
            control_hz=self.control_hz or row.contract.control_hz,
            units=units,
            info={**row.info, "prompt": row.instruction},
        )

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Tensor:
        return x["action"]


def _refuse_rtc(request: Any) -> None:
    """Say why real-time chunking is refused; other unknown options are told by core."""
    rows = [request] if isinstance(request, Observation) else request
    if not isinstance(rows, list | tuple):
        return
    for row in rows:
        options = row.options if isinstance(row, Observation) else None
        if isinstance(options, Mapping) and options.get("rtc") is not None:
            raise RequestError(
                "option rtc must be left out: this model has no real-time chunking (capability "
                "rtc is empty); got one. Execute the chunk and ask for the next one."
            )
