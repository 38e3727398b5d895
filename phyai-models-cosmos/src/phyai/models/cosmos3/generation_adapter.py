"""Plugin ``cosmos3``: videos and images, with or without sound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phyai.adapter import observations
from phyai.cache import Cache
from phyai.errors import ConfigError, RequestError
from phyai.layers import Placement
from phyai.models.cosmos3.adapter import Cosmos3Base
from phyai.models.cosmos3.args import Cosmos3Args
from phyai.models.cosmos3.batch import HostRow, Sampling
from phyai.models.cosmos3.checkpoint_files import SOUND_FOLDER, uses_system_prompt
from phyai.models.cosmos3.decoding import decode_frames, decode_pixels, spatial_tiling
from phyai.models.cosmos3.generation import (
    IMAGE,
    VIDEO,
    Cosmos3Processor,
    MediaRow,
    SoundFormat,
    sound_media,
    video_media,
)
from phyai.models.cosmos3.generation_rows import generation_rows
from phyai.models.cosmos3.options import COMMON, GENERATION_OWN
from phyai.models.cosmos3.request import Cosmos3T2VRequest
from phyai.models.cosmos3.request_rows import row_noise, sampling_of
from phyai.models.cosmos3.sound import SoundConfig, SoundDecoder
from phyai.types import Media, Observation, Output, Prepared

if TYPE_CHECKING:
    from phyai.types import Tensors

OPTIONS = (*COMMON, *GENERATION_OWN)


class Cosmos3Adapter(Cosmos3Base):
    """Generation behind the runtime; a graph per step, so that requests tell their progress."""

    name = "cosmos3"
    args_cls = Cosmos3Args
    graph_unit = "step"
    action = False

    args: Cosmos3Args

    def check_parts(self, folder: Path | None) -> None:
        tiles = spatial_tiling(self)
        if tiles is not None:
            tiles.check(self.vae_config.scale_factor_spatial)
        self.sound_config = self._sound_config(folder)
        self.system_prompt = uses_system_prompt(folder)

    def load_more(self, folder: Path | None, at: Placement) -> None:
        self.sound_decoder: SoundDecoder | None = None
        config, rates = self.sound_config, None
        if config is not None and folder is not None:
            rates = SoundFormat(config.sampling_rate, config.hop_size)
            self.sound_decoder = SoundDecoder(config, at)
            self.sound_decoder.load(folder / SOUND_FOLDER, progress=self.services.progress)
        self.processor = Cosmos3Processor(
            self.network_config,
            self.tokenizer,
            self.args,
            self.vae_config,
            sound=rates,
            system=self.system_prompt,
        )

    def _sound_config(self, folder: Path | None) -> SoundConfig | None:
        """Return the sound decoder's sizes, None when it is not wanted or there is none."""
        wanted = self.args.load_sound
        inner = None if folder is None else folder / SOUND_FOLDER
        there = inner is not None and inner.is_dir() and self.network_config.sound_gen
        if wanted and not there:
            raise ConfigError(
                f"load_sound needs a checkpoint with a folder {SOUND_FOLDER!r} and sound heads; "
                f"got {str(folder)!r}. Leave load_sound out."
            )
        if wanted is False or not there or inner is None:
            return None
        config = SoundConfig.from_folder(inner)
        if config.vocoder_input_dim != self.network_config.sound_dim:
            raise ConfigError(
                f"the sound decoder must take {self.network_config.sound_dim} channels, as the "
                f"transformer's; got {config.vocoder_input_dim}. Use the parts of one checkpoint."
            )
        return config

    def expects(self) -> Mapping[str, Any]:
        return {"cameras": (), "optional_cameras": True, "prompt": True}

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, Cosmos3T2VRequest):
            rows, sampling = self._rows(request)
            batch = self.batch(rows, sampling, None)
            if request.sound_frames:  # the sample rate of its result has no rows
                return Prepared(batch.tensors, batch.rows, batch.key, joinable=False)
            return batch
        try:
            seen = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        except TypeError as error:
            raise TypeError(
                f"plugin {self.name!r} takes an Observation, a list of them or Cosmos3T2VRequest; "
                f"got {type(request).__name__}. Send one of them."
            ) from error
        if self.vae is None:
            raise RequestError(
                "prompts need a checkpoint; got an engine with random weights. Send model requests."
            )
        made = [self._asked(row) for row in seen]
        sampling = self.common([sampling for _, sampling, _ in made])
        meta = tuple(row for _, _, row in made)
        return self.batch([row for row, _, _ in made], sampling, meta)

    def _asked(self, observation: Observation) -> tuple[HostRow, Sampling, MediaRow]:
        for name in observation.images:
            if name not in (IMAGE, VIDEO):
                raise RequestError(
                    f"images must be {IMAGE!r} (the first frame) or {VIDEO!r} (the beginning); got "
                    f"{name!r}. Rename it."
                )
        if observation.state is not None:
            raise RequestError("state must be left out: generation sees none. Drop it.")
        options = dict(observation.options)
        options["noise"] = row_noise(options.get("noise"), "video")
        request, meta = self.processor.row(
            observation.prompt,
            image=observation.images.get(IMAGE),
            video=observation.images.get(VIDEO),
            **options,
        )
        (row,), sampling = self._rows(request)
        return row, sampling, meta

    def _rows(self, request: Cosmos3T2VRequest) -> tuple[list[HostRow], Sampling]:
        if request.sound_frames and self.sound_decoder is None and self.vae is not None:
            raise RequestError(
                f"sound_frames must be left out: the checkpoint has no {SOUND_FOLDER}, or "
                f"load_sound is off; got {request.sound_frames}. Leave it out."
            )
        rows = generation_rows(request, self.network_config, self.args, self.vae_scale)
        return rows, sampling_of(request, self.args, self.scheduler)

    # ------------------------------------------------------------ results

    def output(self) -> Output:
        return GenerationOutput(self)


class GenerationOutput:
    """Latents -> media, or pixels and waveforms."""

    def __init__(self, adapter: Cosmos3Adapter) -> None:
        self.adapter = adapter

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> list[Media]:
        if prepared.meta is None:
            raise RequestError("a model request has no media; ask for its tensors.")
        clips = decode_frames(self.adapter, x["video"])
        waves = self._waveforms(x)
        return [
            self._media(clip, row, None if waves is None else waves[i])
            for i, (clip, row) in enumerate(zip(clips, prepared.meta, strict=True))
        ]

    def _media(self, clip: np.ndarray, row: MediaRow, wave: Tensor | None) -> Media:
        sound = None
        if wave is not None and row.sound is not None:
            sound = sound_media(wave, row.sound.sampling_rate, row.samples)
        return video_media(clip, row.fps, sound=sound, info={"prompt": row.prompt})

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> Any:
        if self.adapter.vae is None:
            return {f"{leaf}_latents": tensor for leaf, tensor in x.items()}
        video = decode_pixels(self.adapter, x["video"])
        waves = self._waveforms(x)
        if waves is None:
            return video
        decoder = self.adapter.sound_decoder
        assert decoder is not None
        return {"video": video, "sound": waves, "sample_rate": decoder.config.sampling_rate}

    def _waveforms(self, x: Tensors) -> Tensor | None:
        """Return [B, channels, samples] in [-1, 1]; None without sound."""
        decoder = self.adapter.sound_decoder
        if "sound" not in x or decoder is None:
            return None
        with self.adapter.services.profile.stage("sound"):
            # Row by row, as videos: a row must not depend on those beside it.
            return torch.cat([decoder.decode(row[None]) for row in x["sound"]])
