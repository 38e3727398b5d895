"""The official wiring of GR00T N1.7 on transformers' Qwen3-VL modules.

Everything is in one dtype: bfloat16 as shipped (weights, activations, noise and Euler state), or
float32. The feature is the last text layer's output before the final norm. The final norm runs, as
in the official forward; the output head, of which newer official code computes one position, does
not.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.filling import fill, stored_keys
from benchmarks.peers.groot.batch import Batch
from benchmarks.peers.groot.head import ActionHead
from benchmarks.peers.groot.sizes import UNUSED, GrootSizes
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLModel  # type: ignore[import-not-found]
from transformers.models.qwen3_vl.modeling_qwen3_vl import (  # type: ignore[import-not-found]
    Qwen3VLTextRotaryEmbedding,
    Qwen3VLVisionRotaryEmbedding,
)

BACKBONE = "backbone.model.model."


class OfficialGroot(nn.Module):
    """The network; build it with ``load``."""

    def __init__(self, sizes: GrootSizes, *, keep_keys: bool = False) -> None:
        super().__init__()
        self.sizes = sizes
        self.backbone = Qwen3VLModel(_config(sizes))
        self.action_head = ActionHead(sizes.config, keep_keys=keep_keys)
        self._features: Tensor | None = None

        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._features = inputs[0]

        self.backbone.language_model.norm.register_forward_pre_hook(note)

    def build_rotary(self) -> None:
        """Make the rotary frequencies; being computed, they cannot wait on the meta device."""
        vision, text = self.backbone.visual, self.backbone.language_model
        head = vision.config.hidden_size // vision.config.num_heads
        vision.rotary_pos_emb = Qwen3VLVisionRotaryEmbedding(head // 2)
        text.rotary_emb = Qwen3VLTextRotaryEmbedding(text.config)

    @property
    def dtype(self) -> torch.dtype:
        return self.action_head.vlln.weight.dtype

    # ------------------------------------------------------------ the three stages

    def embed_images(self, batch: Batch) -> Any:
        """Return merged features and deepstack features of all images."""
        return self.backbone.visual(
            batch.pixel_values.to(self.dtype), grid_thw=batch.image_grid_thw
        )

    def encode(self, batch: Batch, seen: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features [B, S, F] the DiT reads, where images are, and what is valid."""
        ids, model = batch.input_ids, self.backbone
        images = ids == model.config.image_token_id
        embeds = model.get_input_embeddings()(ids)
        embeds = embeds.masked_scatter(images[..., None], seen.pooler_output.to(embeds.dtype))
        positions, _ = model.get_rope_index(
            ids,
            mm_token_type_ids=images.int(),
            image_grid_thw=batch.image_grid_thw,
            attention_mask=batch.attention_mask,
        )
        model.language_model(
            inputs_embeds=embeds,
            attention_mask=batch.attention_mask,
            position_ids=positions,
            visual_pos_masks=images,
            deepstack_visual_embeds=seen.deepstack_features,
            use_cache=False,
        )
        assert self._features is not None
        return self.action_head.project(self._features), images, batch.attention_mask == 1

    def denoise(self, batch: Batch, features: Tensor, images: Tensor, valid: Tensor) -> Tensor:
        """Return the actions [B, T, A]."""
        return self.action_head.denoise(
            batch.noise.to(self.dtype), features, images, valid, batch.state.to(self.dtype),
            batch.embodiment_id, batch.steps,
        )  # fmt: skip


def load(folder: Path, dtype: str, *, keep_keys: bool = False) -> OfficialGroot:
    """Return the network in evaluation mode with the weights of a checkpoint folder.

    Raises: Refused for missing, unexpected or mis-shaped tensors.
    """
    sizes = GrootSizes.from_folder(folder)
    with torch.device("meta"):
        model = OfficialGroot(sizes, keep_keys=keep_keys)
    stored = {
        _parameter(key): (file, key)
        for key, file in stored_keys(folder).items()
        if not key.startswith(UNUSED)
    }
    # The final norm's result is not read: it gets the values that change nothing.
    norm = model.backbone.language_model.norm
    norm.weight = None
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    fill(model, folder, stored, lambda name: kind)
    norm.weight = nn.Parameter(torch.ones(sizes.text["hidden_size"], dtype=kind))
    model.build_rotary()
    return model.eval().requires_grad_(False)


def _parameter(key: str) -> str:
    return f"backbone.{key.removeprefix(BACKBONE)}" if key.startswith(BACKBONE) else key


def _config(sizes: GrootSizes) -> Any:
    table = copy.deepcopy(dict(sizes.backbone))
    table["text_config"]["num_hidden_layers"] = sizes.layers
    config = Qwen3VLConfig(**table)
    config._attn_implementation = "sdpa"  # the official choice where flash-attn is not installed
    return config
