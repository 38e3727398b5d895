"""What both plugins share: weights, the parts of the contract, and how a batch is encoded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phyai import hub
from phyai.adapter import Adapter
from phyai.cache import Cache
from phyai.errors import CheckpointError, MissingTensors, RequestError
from phyai.layers import Placement
from phyai.models.cosmos3.args import CheckpointArgs, choose_dtype
from phyai.models.cosmos3.batch import PIXELS, HostRow, Sampling, assemble
from phyai.models.cosmos3.checkpoint import Cosmos3Weights, with_stored_heads
from phyai.models.cosmos3.checkpoint_files import (
    VAE_FOLDER,
    part_folder,
    text_tokenizer,
)
from phyai.models.cosmos3.clip_encoding import ClipEncoder
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.network.conditioning import Cosmos3Conditioning
from phyai.models.cosmos3.network.denoiser import Cosmos3Denoiser
from phyai.models.cosmos3.network.text import Cosmos3Text
from phyai.models.cosmos3.scheduler_files import SchedulerFile, read_scheduler
from phyai.models.cosmos3.text.tokenizer import TextTokenizer
from phyai.models.cosmos3.vae import VAEConfig, WanVAE
from phyai.types import CacheSpec, Conditioning, Denoiser, Prepared, Solver
from phyai.unipc import UniPC
from phyai.weights import update_tensors

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.weights import LoadReport

log = logging.getLogger("phyai")


class Cosmos3Base(Adapter):
    """One Cosmos3 checkpoint behind the runtime; the two plugins differ in requests and results.

    action, sound: whether the network's heads of this kind are used.  decodes: whether videos are
    made into pixels.
    """

    parallel = frozenset({"tp", "cfg"})
    action = True
    sound = True

    args: CheckpointArgs

    def __init__(self, args: CheckpointArgs, config: EngineConfig, services: Services) -> None:
        super().__init__(args, config, services)
        self.dtype = choose_dtype(args.precision, services.dtype)
        if args.torch_compile or args.compile_kwargs:
            log.warning(
                "plugin %s: torch_compile has no effect; the engine's runtime settings choose "
                "graphs.",
                self.name,
            )

    # ------------------------------------------------------------ weights

    def load(self) -> LoadReport | None:
        args, services = self.args, self.services
        folder = self._folder()
        config = args.config
        if config is None:
            config = Cosmos3Config.from_folder(folder) if folder else Cosmos3Config()
        if folder is not None:
            config = with_stored_heads(config, folder, args.weight_remap)
        self.network_config = config
        self.scheduler = read_scheduler(folder) if folder else SchedulerFile()
        self.tokenizer = self._tokenizer(folder, config)
        self.vae_config = VAEConfig() if folder is None else self._vae_config(folder)
        self.check_parts(folder)
        at = Placement(
            services.kernels,
            services.device,
            self.dtype,
            # In low precision faster kernels may keep more bits than the official code does.
            "official" if self.dtype == torch.float32 else "free",
            tp=services.parallel.tp,
        )
        action, sound = self.action and config.action_gen, self.sound and config.sound_gen
        self.text = Cosmos3Text(
            config, at, services.profile, services.memo, full_last=args.record_all
        )
        self.network = Cosmos3Denoiser(config, at, services.profile, action=action, sound=sound)
        self.texts = Cosmos3Conditioning(
            self.text,
            self.network,
            services.profile,
            static=services.graphs.static_shapes,
        )
        self.modules = self.texts.modules()
        self.vae = self._vae(folder, at)  # reads weights, so after what the layout may refuse
        self.weights = Cosmos3Weights(
            config,
            folder,
            action=action,
            sound=sound,
            seed=args.seed,
            remap=args.weight_remap,
            strict=args.weight_strict,
            full_last=args.record_all,
        )
        report = self.weights.load_into(self.modules, self.dtype, services.progress)
        if report is not None and report.missing:  # reported only, where weights are not strict
            raise MissingTensors(
                f"the transformer's weights must be complete; {len(report.missing)} are missing, "
                f"{report.missing[0]!r} among them. Download the checkpoint again."
            )
        self.load_more(folder, at)
        return report

    def check_parts(self, folder: Path | None) -> None:
        """Raise for what the configs say cannot be, before gigabytes are read.

        ``network_config`` and ``vae_config`` are there; folder None: random weights.
        """

    def load_more(self, folder: Path | None, at: Placement) -> None:
        """Load what one of the plugins needs besides; folder None: random weights."""

    def decodes_video(self) -> bool:
        """Return whether the video decoder is loaded."""
        return True

    def refresh(self) -> None:
        self.network.refresh()

    def update_weights(self, items: Mapping[str, Tensor] | Any) -> None:
        update_tensors(self.modules, items, remap=self.weights.updated_name)

    def dump_targets(self) -> Mapping[str, nn.Module]:
        targets: dict[str, nn.Module] = {"text": self.text, "media": self.network}
        return targets if self.vae is None else {**targets, "vae": self.vae}

    def _folder(self) -> Path | None:
        args = self.args
        if args.checkpoint_dir is None:
            return None
        folder = hub.resolve(args.checkpoint_dir, revision=args.revision, allow=FILES)
        if folder.is_file():
            raise CheckpointError(
                f"checkpoint_dir must be a folder or hub id; got the file {folder}. "
                "Pass its folder."
            )
        return folder

    def _tokenizer(self, folder: Path | None, config: Cosmos3Config) -> TextTokenizer | None:
        if folder is None:
            return None
        return text_tokenizer(folder, config, self.args.max_text_tokens)

    def _vae_config(self, folder: Path) -> VAEConfig:
        config = VAEConfig.from_folder(part_folder(folder, VAE_FOLDER, "the video autoencoder"))
        if config.z_dim != self.network_config.latent_channel:
            raise CheckpointError(
                f"the autoencoder must have {self.network_config.latent_channel} latent channels, "
                f"as the transformer; got {config.z_dim}. Use the parts of one checkpoint."
            )
        return config

    def _vae(self, folder: Path | None, at: Placement) -> WanVAE | None:
        """Return the autoencoder; None with random weights, which take and give latents."""
        if folder is None:
            return None
        precision = self.args.vae_precision
        vae = WanVAE(
            self.vae_config,
            at,
            decoder=self.decodes_video(),
            encode_dtype=None if precision is None else choose_dtype(precision, self.dtype),
            profile=self.services.profile,
        )
        vae.load(folder / VAE_FOLDER, progress=self.services.progress)
        return vae

    # ------------------------------------------------------------ parts

    def denoiser(self) -> Denoiser:
        return self.network

    def conditioning(self) -> Conditioning:
        return MediaConditioning(self)

    def cache(self) -> CacheSpec:
        return self.texts.cache_buffers

    def solver(self) -> Solver:
        return UniPC()

    # ------------------------------------------------------------ requests

    def common(self, samplings: Sequence[Sampling]) -> Sampling:
        """Return how all rows are sampled.  Raises: RequestError when they differ."""
        for i, sampling in enumerate(samplings):
            if sampling != samplings[0]:
                raise RequestError(
                    f"rows of a request must be sampled alike; got {samplings[0]} in row 0 and "
                    f"{sampling} in row {i}. Send them as separate requests."
                )
        return samplings[0]

    def batch(
        self, rows: Sequence[HostRow], sampling: Sampling, meta: tuple[Any, ...] | None
    ) -> Prepared:
        """Return the Prepared batch of rows.  Raises: RequestError."""
        if rows[0].pixels is not None and self.vae is None:
            raise RequestError(
                "pixels need a checkpoint with its video autoencoder; got an engine with random "
                "weights. Send latents."
            )
        return assemble(
            self.network_config,
            rows,
            sampling,
            meta=meta,
            temporal=self.vae_scale[0],
            text_step=self.args.text_step if self.services.graphs.static_shapes else 1,
        )

    @property
    def vae_scale(self) -> tuple[int, int]:
        """Frames of a latent, and pixels along a side of it."""
        return self.vae_config.scale_factor_temporal, self.vae_config.scale_factor_spatial


class MediaConditioning:
    """Encodes the clip a video starts from, then the texts."""

    capture_safe = False

    def __init__(self, adapter: Cosmos3Base) -> None:
        services = adapter.services
        self.inner, self.profile = adapter.texts, services.profile
        vae = adapter.vae
        self.clips = None if vae is None else ClipEncoder(vae, services.memo, services.profile)

    def plan(self, cache: Cache, batch: Prepared) -> None:
        self.inner.plan(cache, batch)
        if self.clips is not None and PIXELS in batch.tensors:
            self.clips.plan(cache, batch)

    def encode(self, cache: Cache) -> None:
        if self.clips is not None and PIXELS in cache.inputs:
            with self.profile.stage("vae"):
                self.clips.encode(cache)
        self.inner.encode(cache)
