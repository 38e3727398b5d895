"""The pipeline of diffusers on a checkpoint folder, with its stages timed and token ids given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.base import Stages
from benchmarks.peers.cosmos.batch import Batch
from benchmarks.peers.cosmos.sizes import (
    TRANSFORMER_FOLDER,
    VAE_FOLDER,
    CosmosSizes,
    Kind,
)
from benchmarks.peers.filling import fill, stored_keys
from benchmarks.peers.weights import NESTED
from diffusers import (  # type: ignore[import-not-found]
    AutoencoderKLWan,
    Cosmos3OmniTransformer,
    UniPCMultistepScheduler,
)
from diffusers.models.transformers import (  # type: ignore[import-not-found]
    transformer_cosmos3,
)
from diffusers.pipelines.cosmos import (  # type: ignore[import-not-found]
    pipeline_cosmos3_omni as official,
)
from PIL import Image
from torch import Tensor, nn

DOMAINS = {7: "bridge_orig_lerobot", 8: "droid_lerobot"}
UNUSED = "lm_head."
OWN_TIER = 1
"""Of a canvas as large as the image, which diffusers has no tier for."""


class GivenTokens:
    """Stands where the tokenizer does; the ids of a request are given."""

    eos_token_id = 0

    @staticmethod
    def convert_tokens_to_ids(token: str) -> int:
        return 0


class TimedPipeline(official.Cosmos3OmniPipeline):  # type: ignore[misc]
    """The pipeline; ``stage`` times encoding and decoding."""

    # Its base takes the names of its arguments for those of its parts, so they must stay.
    stage: Stages
    ids: tuple[list[int], list[int]]
    scheduler: Any
    last_latents: Tensor | None = None

    def watch(self) -> TimedPipeline:
        """Begin to time the decoder; returns itself."""
        self.stage, self.vae.decode = Stages(), self._timed_decode(self.vae.decode)
        self.set_progress_bar_config(disable=True)
        return self

    def take(self, batch: Batch) -> None:
        """Use the texts and the schedule of a request."""
        self.ids = (batch.input_ids[0].tolist(), batch.neg_input_ids[0].tolist())
        self.scheduler = UniPCMultistepScheduler.from_config(
            self.scheduler.config, use_karras_sigmas=False, flow_shift=batch.flow_shift
        )

    def tokenize_prompt(self, *_: Any, **__: Any) -> tuple[list[int], list[int]]:
        return self.ids

    def keep(self, _: Any, step: int, time: Any, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Remember the latents of a step; the pipeline calls it after each."""
        self.last_latents = values["latents"]
        return {}

    def _encode_video(self, x: Tensor) -> Tensor:
        with self.stage("vision"):
            found: Tensor = super()._encode_video(x)
        return found

    def _timed_decode(self, decode: Any) -> Any:
        def timed(*args: Any, **fields: Any) -> Any:
            with self.stage("decode"):
                return decode(*args, **fields)

        return timed


def action_of(pipeline: TimedPipeline, batch: Batch) -> tuple[Any, Tensor, Tensor]:
    """Return the pipeline's condition, and the latents and actions it starts from.

    The latents hold the first frame as the pipeline itself encodes it.
    """
    assert batch.image is not None
    assert batch.domain_id is not None
    frame = batch.image[0].numpy()
    rows, raw = batch.noise.shape[1:]
    action = official.CosmosActionCondition(
        mode="policy",
        chunk_size=rows,
        domain_name=DOMAINS[int(batch.domain_id[0])],
        resolution_tier=_tier(batch, *frame.shape[:2]),
        image=Image.fromarray(frame),
    )
    assert action.raw_action_dim == raw
    clip, size, _, _ = pipeline._prepare_action_video_conditioning(
        [action.image], action.resolution_tier, rows + 1, device="cpu", dtype=torch.float32
    )
    seen = pipeline._encode_video(clip).float()
    latents = batch.latents.clone()
    latents[:, :, 0] = pipeline._remove_action_video_padding_from_latent(seen, size)[:, :, 0]
    actions = torch.zeros(rows, pipeline.transformer.action_dim)
    actions[:, :raw] = batch.noise[0]
    return action, latents, actions


def _tier(batch: Batch, height: int, width: int) -> int:
    """Return the tier of the canvas; one as large as the image is made known to the pipeline."""
    if batch.tier is not None:
        return int(batch.tier)
    bins: dict[str, dict[str, tuple[int, int]]] = official._ACTION_RESOLUTION_BINS
    bins[str(OWN_TIER)] = {str(height / width): (height, width)}
    return OWN_TIER


def load(folder: Path, dtype: str, kind: Kind) -> TimedPipeline:
    """Return the pipeline with the weights of a checkpoint folder.

    Raises: Refused for missing, unexpected or mis-shaped tensors.
    """
    sizes = CosmosSizes.from_folder(folder, kind=kind)
    narrow = torch.bfloat16 if dtype == "bf16" else torch.float32
    with torch.device("meta"):
        transformer = Cosmos3OmniTransformer.from_config(dict(sizes.transformer))
        vae = AutoencoderKLWan.from_config(dict(sizes.vae))
    del transformer.lm_head  # memory and no time: nothing here reads it
    # As deployed: the time embedding stays in float32.
    _fill(transformer, folder / TRANSFORMER_FOLDER, narrow, wide="time_embedder.")
    _fill(vae, folder / VAE_FOLDER, narrow)
    transformer.rotary_emb = _rotary(transformer.config)
    scheduler = json.loads((folder / "scheduler/scheduler_config.json").read_text("utf-8"))
    made = TimedPipeline(
        transformer=transformer.eval(),
        vae=vae.eval(),
        text_tokenizer=GivenTokens(),
        scheduler=UniPCMultistepScheduler.from_config(scheduler),
        enable_safety_checker=False,
    )
    return made.watch()


def _fill(model: nn.Module, folder: Path, dtype: torch.dtype, wide: str = "none.") -> None:
    stored = {
        key: (file, key)
        for key, file in stored_keys(folder, NESTED).items()
        if not key.startswith(UNUSED)
    }
    fill(model, folder, stored, lambda key: torch.float32 if key.startswith(wide) else dtype)


def _rotary(config: Mapping[str, Any]) -> nn.Module:
    """Return the frequencies; being computed, they cannot wait on the meta device."""
    made: nn.Module = transformer_cosmos3.Cosmos3VLTextRotaryEmbedding(
        config["head_dim"], config["rope_theta"], config["rope_axes_dim"]
    )
    return made
