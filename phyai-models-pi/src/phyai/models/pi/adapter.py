"""The adapter pi0 and pi0.5 share: load, prepare, and the parts core runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from phyai import hub
from phyai.adapter import Adapter, AdapterArgs, check_rows, draw_noise, observations
from phyai.cache import Cache
from phyai.errors import CheckpointError, ConfigError, RequestError
from phyai.layers import Placement
from phyai.models.pi.checkpoint import PiWeights
from phyai.models.pi.config import Model, PiConfig
from phyai.models.pi.network.denoiser import PiDenoiser
from phyai.models.pi.network.plan import PrefixShape, pack_prefix
from phyai.models.pi.network.precision import choose_precision
from phyai.models.pi.network.prefix import Prefix
from phyai.models.pi.processing.processor import PiRow, Processor
from phyai.models.pi.request import MAX_STEPS, assemble
from phyai.request_values import checked, common_steps
from phyai.rtc_options import as_rtc, left_over, rtc_per_row
from phyai.types import (
    ActionChunk,
    BufferSpec,
    CacheSpec,
    Conditioning,
    Denoiser,
    Key,
    Output,
    Prepared,
    RTCOptions,
)
from phyai.weights import update_tensors

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.types import Tensors
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")

OPTIONS = ("seed", "noise", "num_steps", "rtc")


@dataclass
class PiArgs(AdapterArgs):
    """Arguments of pi0 and pi0.5.

    checkpoint_dir: folder or hub id (``org/name[@revision]``); None = random weights at the
        config's sizes.  config: overrides the checkpoint's own.
    precision: fp32, bf16_lerobot or bf16_openpi (``bf16``); None = from the engine's params_dtype
        and vision_params_dtype.
    tokenizer: path of tokenizer.json or tokenizer.model, or of a folder with one.
    processor_dir, norm_stats, asset_id: where the statistics are, when not beside the weights.
    robot: libero, droid or aloha input/output contract.  openpi_config: name of an openpi train
        config whose inference settings to take.
    interpolation, legacy_padding, state_prompt_dim, state_in_prompt, default_prompt, overlong:
        preprocessing switches, see ``phyai.models.pi.processing.processor``.
    control_hz, action_units: commands per second and one unit per action, for checkpoints whose
        files do not say; None = the robot contract's.
    seed: of random weights.  embedding_in_file: leave the token embedding in the memory-mapped
        checkpoint (1 GB less at the released size); the file must stay unchanged meanwhile.
    """

    checkpoint_dir: str | Path | None = None
    config: PiConfig | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | dict[str, str] | None = None
    weight_strict: bool = True
    embedding_in_file: bool = False
    vision_params_dtype: torch.dtype | None = None
    inputs_image_shape: list[list[int]] | None = None
    revision: str | None = None
    precision: str | None = None
    tokenizer: str | Path | None = None
    processor_dir: str | Path | None = None
    norm_stats: str | Path | None = None
    asset_id: str | None = None
    robot: str | None = None
    openpi_config: str | None = None
    interpolation: str | None = None
    legacy_padding: bool = False
    state_prompt_dim: int | None = None
    state_in_prompt: bool | None = None
    default_prompt: str | None = None
    overlong: Literal["error", "truncate"] = "error"
    control_hz: float | None = None
    action_units: tuple[str, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.max_batch_size, bool) or not isinstance(self.max_batch_size, int):
            raise ConfigError(
                f"{type(self).__name__}.max_batch_size must be an int; got {self.max_batch_size!r}."
            )
        if self.max_batch_size < 1:
            raise ConfigError(
                f"{type(self).__name__}.max_batch_size must be at least 1; "
                f"got {self.max_batch_size}."
            )
        if self.control_hz is not None and not self.control_hz > 0:
            raise ConfigError(
                f"{type(self).__name__}.control_hz must be positive; got {self.control_hz!r}."
            )


@dataclass(frozen=True)
class PiRequest:
    """A model request: everything already preprocessed.

    pixel_values: float [B, C, 3, S, S] in [-1, 1].  input_ids: int64 [B, n] right padded.
    lang_lens: int64 [B].  noise: float [B, T, A], None = fresh (from ``seed`` when given).
    image_masks: bool [B, C], None = all present.  rtc: one RTCOptions for all rows (prev_chunk
    [T, A] or [B, T, A]) or one per row.
    Result: float32 [B, T, A] in model space.
    """

    pixel_values: Tensor
    input_ids: Tensor
    lang_lens: Tensor
    noise: Tensor | None = None
    image_masks: Tensor | None = None
    num_steps: int | None = None
    seed: int | None = None
    rtc: RTCOptions | Sequence[RTCOptions | None] | None = None


class PiAdapter(Adapter):
    """One pi checkpoint behind the runtime; subclasses name the model and its denoiser."""

    model: ClassVar[Model]
    request_cls: ClassVar[type[PiRequest]]
    denoiser_cls: ClassVar[type[PiDenoiser]]
    needs_state: ClassVar[bool] = False
    parallel = frozenset({"tp"})

    args: PiArgs

    def __init__(self, args: PiArgs, config: EngineConfig, services: Services) -> None:
        super().__init__(args, config, services)
        self.precision = choose_precision(args.precision, services.dtype, args.vision_params_dtype)

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
        self.pi = args.config or (
            PiConfig.from_folder(folder, self.model) if folder else PiConfig.default(self.model)
        )
        weights = PiWeights(self.model, args, folder)
        weights.check_model()
        if args.config is None:
            weights.check_adapter(self.pi)
            self.pi = weights.fit_state(self.pi)
        self.processor = Processor.from_checkpoint(
            folder,
            self.pi,
            tokenizer=args.tokenizer,
            processor_dir=args.processor_dir,
            norm_stats=args.norm_stats,
            robot=args.robot,
            openpi_config=args.openpi_config,
            asset_id=args.asset_id,
            interpolation=args.interpolation,
            legacy_padding=args.legacy_padding,
            state_prompt_dim=args.state_prompt_dim,
            state_in_prompt=args.state_in_prompt,
            default_prompt=args.default_prompt,
            overlong=args.overlong,
        )
        at = Placement(
            services.kernels,
            services.device,
            self.precision.stack,
            self.precision.rounding,
            tp=services.parallel.tp,
        )
        self.prefix = Prefix(
            self.pi, self.precision, at, services.profile, embedding_in_file=args.embedding_in_file
        )
        self.network = self.denoiser_cls(self.pi, self.precision, at, services.profile)
        self.modules = nn.ModuleDict({"prefix": self.prefix, "expert": self.network})
        report = weights.load_into(self.modules, self.precision.stack, services.progress)
        for warning in self.processor.warnings:
            log.warning("plugin %s: %s", self.name, warning)
        return report

    def refresh(self) -> None:
        self.network.refresh()

    def update_weights(self, items: Mapping[str, Tensor] | Any) -> None:
        update_tensors(self.modules, items, remap=PiWeights.updated_name)

    def dump_targets(self) -> Mapping[str, nn.Module]:
        return {"prefix": self.prefix, "expert": self.network}

    def expects(self) -> Mapping[str, Any]:
        processor = self.processor
        return {
            "cameras": processor.camera_names,
            "optional_cameras": True,
            "state_dim": processor.state_dim if processor.needs_state else None,
            "prompt": processor.settings.default_prompt is None,
            "tokenizer": processor.tokenizer_source.label,
        }

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, PiRequest):
            if not isinstance(request, self.request_cls):
                raise TypeError(
                    f"plugin {self.name!r} takes {self.request_cls.__name__} or Observation; "
                    f"got {type(request).__name__}."
                )
            return self._prepare_model_request(request)
        try:
            rows = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        except TypeError as error:
            raise TypeError(
                f"plugin {self.name!r} takes an Observation, a list of them or "
                f"{self.request_cls.__name__}; got {type(request).__name__}."
            ) from error
        return self._prepare_observations(rows)

    def _prepare_observations(self, rows: Sequence[Any]) -> Prepared:
        processed = [self.processor.row(row) for row in rows]
        noise = torch.stack([self._row_noise(row.options) for row in rows])
        rtc = [self._row_rtc(row.options, done) for row, done in zip(rows, processed, strict=True)]
        return assemble(
            self.pi,
            images=torch.stack([row.images for row in processed]),
            image_mask=torch.stack([row.image_mask for row in processed]),
            tokens=torch.stack([row.tokens for row in processed]),
            token_len=torch.tensor([row.length for row in processed]),
            noise=noise,
            state=torch.stack([row.state for row in processed]) if self.needs_state else None,
            num_steps=common_steps(
                [row.options for row in rows], self.pi.num_inference_steps, MAX_STEPS
            ),
            rtc=rtc,
            meta=tuple(processed),
        )

    def _prepare_model_request(self, request: PiRequest) -> Prepared:
        pi, size = self.pi, self.pi.vision.image_size
        channels = pi.vision.num_channels
        images = checked("pixel_values", request.pixel_values, (None, None, channels, size, size))
        rows, cameras = images.shape[:2]
        check_rows(rows, self.args.max_batch_size)
        limit = len(self.args.inputs_image_shape or ()) or max(len(pi.cameras), 1)
        if not 1 <= cameras <= limit:
            raise RequestError(
                f"pixel_values must hold 1 to {limit} cameras; got {cameras}. "
                "Send the checkpoint's cameras in its order."
            )
        mask = torch.ones(rows, cameras, dtype=torch.bool)
        if request.image_masks is not None:
            mask = checked("image_masks", request.image_masks, (rows, cameras), torch.bool)
        tokens, lens = self._tokens(request, rows)
        shape = (rows, pi.chunk_size, pi.max_action_dim)
        noise = (
            draw_noise(shape, request.seed)
            if request.noise is None
            else checked("noise", request.noise, shape)
        )
        return assemble(
            pi,
            images=images,
            image_mask=mask,
            tokens=tokens,
            token_len=lens,
            noise=noise,
            state=self._request_state(request, rows),
            num_steps=request.num_steps,
            rtc=rtc_per_row(request.rtc, rows),
            meta=None,
        )

    def _tokens(self, request: PiRequest, rows: int) -> tuple[Tensor, Tensor]:
        longest = max(self.pi.tokenizer_max_length, self.processor.max_length)
        tokens = checked("input_ids", request.input_ids, (rows, None), torch.int64)
        lens = checked("lang_lens", request.lang_lens, (rows,), torch.int64)
        if not 1 <= tokens.shape[1] <= longest:
            raise RequestError(
                f"input_ids must hold 1 to {longest} tokens per row; got {tokens.shape[1]}."
            )
        if int(lens.min()) < 1 or int(lens.max()) > tokens.shape[1]:
            raise RequestError(
                f"lang_lens must be in [1, {tokens.shape[1]}]; got {lens.tolist()}. "
                "An empty prompt has no tokens to attend to."
            )
        vocab = self.pi.text.vocab_size
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise RequestError(
                f"input_ids must be in [0, {vocab}); got "
                f"[{int(tokens.min())}, {int(tokens.max())}]. Check the tokenizer."
            )
        return tokens, lens

    def _request_state(self, request: PiRequest, rows: int) -> Tensor | None:
        return None

    def _row_noise(self, options: Mapping[str, Any]) -> Tensor:
        shape = (self.pi.chunk_size, self.pi.max_action_dim)
        noise = options.get("noise")
        if noise is None:
            return draw_noise(shape, options.get("seed"))
        return checked("option noise", noise, shape)

    def _row_rtc(self, options: Mapping[str, Any], row: PiRow) -> RTCOptions | None:
        rtc = as_rtc(options.get("rtc"))
        if rtc is None or rtc.space == "model":
            return rtc
        chunk, width = left_over(rtc), self.processor.action_dim
        if chunk.shape[1] != width:
            raise RequestError(
                f"rtc prev_chunk in robot space must have {width} action dims; "
                f"got {chunk.shape[1]}. Send the rest of the last chunk as it came."
            )
        return rtc.with_chunk(self.processor.model_space(chunk.numpy(), row))

    # ------------------------------------------------------------ parts

    def denoiser(self) -> Denoiser:
        return self.network

    def conditioning(self) -> Conditioning:
        return PiConditioning(self)

    def cache(self) -> CacheSpec:
        return self._buffers

    def output(self) -> Output:
        return PiOutput(self.processor, self.args)

    def prefix_shape(self, key: Key, rows: int) -> PrefixShape:
        tail = self.network.state_tokens + self.pi.chunk_size
        return PrefixShape(
            rows, key.bucket("cameras"), self.pi.vision.num_patches, key.bucket("tokens"), tail
        )

    def _buffers(self, key: Key) -> Mapping[str, BufferSpec]:
        shape = self.prefix_shape(key, 1)
        return {**self.prefix.cache_buffers(shape), **self.network.cache_buffers(shape.stride)}


class PiConditioning:
    """Packs the batch on the host, then fills the prefix K/V and what the suffix needs of it."""

    def __init__(self, adapter: PiAdapter) -> None:
        self.adapter = adapter

    def plan(self, cache: Cache, batch: Prepared) -> None:
        shape = self.adapter.prefix_shape(cache.key, cache.capacity)
        plan = pack_prefix(
            batch.tensors["image_mask"],
            batch.tensors["tokens"],
            batch.tensors["token_len"],
            shape,
            static=self.adapter.services.graphs.static_shapes,
        )
        self.adapter.prefix.load_plan(cache, plan)

    def encode(self, cache: Cache) -> None:
        self.adapter.prefix.encode(cache)
        self.adapter.network.encode(cache)


class PiOutput:
    """Model space -> robot units, row by row, with the statistics and the state of that row."""

    def __init__(self, processor: Processor, args: PiArgs) -> None:
        self.processor = processor
        self.control_hz = args.control_hz or processor.control_hz
        self.units = args.action_units or processor.units

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        if prepared.meta is None:
            raise RequestError("a model request has no robot units; ask for its tensors.")
        model = x["action"].float().cpu().numpy()
        return [
            ActionChunk(
                actions=self.processor.actions(chunk, row),
                names=self.processor.action_names,
                mask=np.ones(len(chunk), dtype=bool),
                model_actions=chunk,
                control_hz=self.control_hz,
                units=self.units,
                info={"prompt": row.prompt_text},
            )
            for chunk, row in zip(model, prepared.meta, strict=True)
        ]

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Tensor:
        return x["action"]
