"""The official wiring of MiniCPM-RobotManip on transformers' MiniCPM-V 4.6.

The vision tower, its mergers and the Qwen3.5 decoder are in one dtype: bfloat16 as shipped, or
float32. The head and its loop are in float32 always, and read every position behind the final norm.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.base import Refused
from benchmarks.peers.filling import fill, stored_keys
from benchmarks.peers.minicpm.batch import Batch
from benchmarks.peers.minicpm.head import ActionHead
from benchmarks.peers.minicpm.sizes import UNUSED, MiniCPMSizes
from torch import Tensor, nn
from transformers import MiniCPMV4_6Config, MiniCPMV4_6Model  # type: ignore[import-not-found]
from transformers.models.qwen3_5 import (  # type: ignore[import-not-found]
    modeling_qwen3_5 as qwen3_5,
)

FIELDS = ("insert_layer_id", "image_size", "image_token_id", "video_token_id", "downsample_mode",
          "merge_kernel_size", "merger_times", "drop_vision_last_layer", "tie_word_embeddings",
          "text_config", "vision_config")  # fmt: skip
PARTS = {  # released name -> module; the longer names of one part come first
    "vlm.llm.model.": "vlm.language_model.",
    "vlm.vpm.": "vlm.vision_tower.",
    "vlm.vit_merger.": "vlm.vision_tower.vit_merger.",
    "vlm.resampler.mlp.0.mlp.0.": "vlm.merger.mlp.0.linear_1.",
    "vlm.resampler.mlp.0.mlp.2.": "vlm.merger.mlp.0.linear_2.",
    "vlm.resampler.": "vlm.merger.",
}


class OfficialMiniCPM(nn.Module):
    """The network; build it with ``load``."""

    def __init__(self, sizes: MiniCPMSizes, attention: str) -> None:
        super().__init__()
        self.vlm = MiniCPMV4_6Model(_config(sizes, attention))
        self.action_head = ActionHead(sizes.head)

    @property
    def attention(self) -> str:
        """What the vision tower and the full layers of the decoder compute attention with."""
        parts = (self.vlm.vision_tower, self.vlm.language_model)
        return " and ".join(sorted({part.config._attn_implementation for part in parts}))

    def build_rotary(self) -> None:
        """Make the rotary frequencies; being computed, they cannot wait on the meta device."""
        text = self.vlm.language_model
        text.rotary_emb = qwen3_5.Qwen3_5TextRotaryEmbedding(text.config)

    # ------------------------------------------------------------ the three stages

    def embed_images(self, batch: Batch) -> Any:
        """Return the merged features of all images."""
        return self.vlm.get_image_features(batch.pixel_values, batch.target_sizes)

    def encode(self, batch: Batch, seen: Any) -> Tensor:
        """Return the last hidden state [B, S, F] float32, which the head reads."""
        found = self.vlm(
            input_ids=batch.input_ids, mm_encoder_outputs={"image": seen}, use_cache=False
        )
        features: Tensor = found.last_hidden_state.float()
        return features

    def denoise(self, batch: Batch, features: Tensor) -> Tensor:
        """Return the actions [B, T, A]."""
        assert batch.noise is not None
        assert batch.state is not None
        assert batch.embodiment_id is not None
        state = batch.state.view(len(batch.noise), 1, -1)
        return self.action_head.denoise(
            batch.noise, features, state, batch.embodiment_id, batch.steps
        )


def load(folder: Path, dtype: str, *, attention: str = "eager") -> OfficialMiniCPM:
    """Return the network in evaluation mode with the weights of a checkpoint folder.

    Raises: Refused for missing, unexpected or mis-shaped tensors.
    """
    with torch.device("meta"):
        model = OfficialMiniCPM(MiniCPMSizes.from_folder(folder), attention)
    if model.attention != attention:
        raise Refused(f"attention must be {attention} in every part; got {model.attention}.")
    stored = {
        _parameter(key): (file, key)
        for key, file in stored_keys(folder).items()
        if not key.startswith(UNUSED)
    }
    narrow = torch.bfloat16 if dtype == "bf16" else torch.float32
    fill(model, folder, stored, lambda name: narrow if name.startswith("vlm.") else torch.float32)
    model.build_rotary()
    return model.eval().requires_grad_(False)


def linear_attention() -> str:
    """Return which functions the gated delta layers take in this environment.

    transformers replaces its own, in PyTorch, by those of other packages where they are installed.
    """
    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    return " and ".join(_origin(getattr(qwen3_5, name)) for name in names)


def _origin(function: Any) -> str:
    while True:
        inner = inspect.getclosurevars(function).nonlocals
        found = inner.get("implementation")
        if found is not None:
            return f"{found.__module__}.{found.__name__}"
        function = next((v for v in inner.values() if inspect.isfunction(v)), None)
        if function is None:
            return "unknown"


def _parameter(key: str) -> str:
    for part, module in PARTS.items():
        if key.startswith(part):
            return module + key.removeprefix(part)
    return key


def _config(sizes: MiniCPMSizes, attention: str) -> Any:
    table = {name: value for name, value in sizes.config.items() if name in FIELDS}
    config = MiniCPMV4_6Config(**copy.deepcopy(table))
    config._attn_implementation = attention
    return config
