"""The adapter of GR00T N1.7: load, prepare, and the parts core runs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from phyai.models.gr00t.args import GrootArgs, choose_dtype
from phyai.models.gr00t.checkpoint import GrootWeights
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.network.denoiser import GrootDenoiser
from phyai.models.gr00t.network.plan import RowShape
from phyai.models.gr00t.network.prefix import Prefix
from phyai.models.gr00t.processing.processor import GrootRow, Processor
from phyai.models.gr00t.request import MAX_STEPS, GrootRequest, HostRow, assemble
from phyai.models.gr00t.request_rows import request_rows
from phyai.models.gr00t.rtc_inputs import RtcStart, rtc_start
from phyai.request_values import checked, common_steps
from phyai.rtc_options import as_rtc, left_over
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
)
from phyai.weights import update_tensors

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.types import Tensors
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")

OPTIONS = ("seed", "noise", "num_steps", "rtc", "embodiment")


class GrootAdapter(Adapter):
    """One GR00T N1.7 checkpoint behind the runtime; every embodiment it knows, in one engine."""

    name = "gr00t_n17"
    args_cls = GrootArgs

    args: GrootArgs

    def __init__(self, args: GrootArgs, config: EngineConfig, services: Services) -> None:
        super().__init__(args, config, services)
        self.dtype = choose_dtype(args.precision, services.dtype)

    # ------------------------------------------------------------ weights

    def load(self) -> LoadReport | None:
        args, services = self.args, self.services
        folder: Path | None = None
        if args.checkpoint_dir is not None:
            folder = hub.resolve(args.checkpoint_dir, revision=args.revision)
            if folder.is_file():
                raise CheckpointError(
                    f"checkpoint_dir must be a folder or hub id; got the file {folder}. "
                    "Pass its folder."
                )
        backbone = None if args.backbone_dir is None else hub.resolve(args.backbone_dir)
        self.groot = args.config or (
            GrootConfig.from_folder(folder, backbone) if folder else GrootConfig.released()
        )
        self.processor = Processor.from_checkpoint(
            folder,
            self.groot,
            embodiment=args.embodiment,
            backbone_dir=backbone,
            processor_dir=args.processor_dir,
            formalize_language=args.formalize_language,
            letter_box_transform=args.letter_box_transform,
            max_text_tokens=args.max_text_tokens,
        )
        # In low precision faster kernels may keep more bits than the official code does.
        rounding = "official" if self.dtype == torch.float32 else "free"
        at = Placement(services.kernels, services.device, self.dtype, rounding)
        self.prefix = Prefix(self.groot, at, services.profile)
        self.network = GrootDenoiser(self.groot, at, services.profile)
        self.modules = nn.ModuleDict({"prefix": self.prefix, "expert": self.network})
        self.weights = GrootWeights(self.groot, args, folder)
        report = self.weights.load_into(self.modules, self.dtype, services.progress)
        for warning in self.processor.warnings:
            log.warning("plugin %s: %s", self.name, warning)
        return report

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
        if isinstance(request, GrootRequest):
            rows = request_rows(self.groot, self.args, request)
            padded = request.input_ids.shape[1] if self.args.official_padding else 0
            return self._assemble(rows, request.num_steps, padded, None)
        try:
            seen = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        except TypeError as error:
            raise TypeError(
                f"plugin {self.name!r} takes an Observation, a list of them or GrootRequest; "
                f"got {type(request).__name__}."
            ) from error
        return self._prepare_observations(seen)

    def _prepare_observations(self, seen: Sequence[Observation]) -> Prepared:
        default = self.groot.num_inference_timesteps
        steps = common_steps([row.options for row in seen], default, MAX_STEPS)
        done = [self.processor.row(row) for row in seen]
        rows = [self._host_row(row, made) for row, made in zip(seen, done, strict=True)]
        longest = max(len(row.tokens) for row in rows)
        padded = longest if self.args.official_padding else 0
        return self._assemble(rows, steps, padded, tuple(done))

    def _assemble(
        self,
        rows: Sequence[HostRow],
        num_steps: int | None,
        padded: int,
        meta: tuple[GrootRow, ...] | None,
    ) -> Prepared:
        return assemble(
            self.groot,
            rows,
            num_steps=num_steps,
            padded=padded,
            max_text=self.args.max_text_tokens,
            meta=meta,
        )

    def _host_row(self, observation: Observation, row: GrootRow) -> HostRow:
        options = observation.options
        shape = (self.groot.action_horizon, self.groot.max_action_dim)
        noise = options.get("noise")
        return HostRow(
            tokens=_tensor(row.input_ids).long(),
            grids=tuple((int(t), int(h), int(w)) for t, h, w in row.grids),
            pixels=_tensor(row.pixel_values),
            state=_tensor(row.state).flatten(),
            embodiment=row.embodiment_id,
            noise=draw_noise(shape, options.get("seed"))
            if noise is None
            else checked("option noise", noise, shape),
            rtc=self._row_rtc(options, row),
        )

    def _row_rtc(self, options: Mapping[str, Any], row: GrootRow) -> RtcStart | None:
        rtc = as_rtc(options.get("rtc"))
        if rtc is None:
            return None
        if rtc.space == "robot":
            rtc = rtc.with_chunk(self.processor.model_space(left_over(rtc).numpy(), row))
        groot = self.groot
        return rtc_start(rtc, groot.action_horizon, groot.max_action_dim, self.args.rtc_ramp_rate)

    def start(self, cache: Cache) -> Tensors:
        """Return the noise, with real-time chunking the previous chunk where it overlaps."""
        noise = cache.inputs["noise.action"]
        overlap = cache.inputs.get("rtc.overlap")
        if overlap is None:
            return {"action": noise.clone()}
        return {"action": torch.where(overlap[..., None], cache.inputs["rtc.start"], noise)}

    # ------------------------------------------------------------ parts

    def denoiser(self) -> Denoiser:
        return self.network

    def conditioning(self) -> Conditioning:
        return GrootConditioning(self)

    def cache(self) -> CacheSpec:
        return self._buffers

    def output(self) -> Output:
        return GrootOutput(self.processor, self.args)

    def row_shape(self, key: Key) -> RowShape:
        """Return the capacities of one row of a key's cache."""
        extra = dict(key.extra)
        return RowShape(
            key.bucket("images"),
            key.bucket("patches"),
            key.bucket("image_patches"),
            key.bucket("text"),
            self.groot.merge,
            bool(extra.get("even", False)),
            int(extra.get("padded", 0)),
        )

    def _buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        shape = self.row_shape(key)
        return {**self.prefix.cache_buffers(shape), **self.network.cache_buffers(shape)}


class GrootConditioning:
    """Packs the batch on the host, then runs the backbone and fills what the steps read."""

    def __init__(self, adapter: GrootAdapter) -> None:
        self.adapter = adapter

    def plan(self, cache: Cache, batch: Prepared) -> None:
        adapter = self.adapter
        static = adapter.services.graphs.static_shapes
        adapter.prefix.load_plan(
            cache, batch, adapter.row_shape(cache.key), tuple(adapter.network.cross), static=static
        )
        adapter.network.load_plan(cache)

    def encode(self, cache: Cache) -> None:
        features = self.adapter.prefix.encode(cache)
        with self.adapter.services.profile.stage("head"):
            self.adapter.network.encode(cache, features)


class GrootOutput:
    """Model space -> robot units, row by row, by the row's embodiment and state."""

    def __init__(self, processor: Processor, args: GrootArgs) -> None:
        self.processor = processor
        self.control_hz, self.units = args.control_hz, args.action_units or ()

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        if prepared.meta is None:
            raise RequestError("a model request has no robot units; ask for its tensors.")
        model = x["action"].float().cpu().numpy()
        return [self._chunk(chunk, row) for chunk, row in zip(model, prepared.meta, strict=True)]

    def _chunk(self, model: np.ndarray, row: GrootRow) -> ActionChunk:
        actions, names = self.processor.decode(model, row)
        steps = len(actions)
        return ActionChunk(
            actions=actions,
            names=names,
            mask=np.ones(steps, dtype=bool),
            model_actions=model[:steps],  # what an embodiment uses of the model's horizon
            control_hz=self.control_hz,
            units=self.units,
            info={"embodiment": row.embodiment, "prompt": row.instruction},
        )

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Tensor:
        return x["action"]


def _tensor(value: Any) -> Tensor:
    return torch.as_tensor(value)
