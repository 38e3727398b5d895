"""The action head of MiniCPM-RobotManip as the official code runs it, from its mathematics.

Its blocks, banks and time codes are those of GR00T's head. In every step it runs both time codes,
all modulations, K and V of every cross attention, the gathering of the embodiments' weights, and
the decoding of the future tokens too. There is no state token: the state stands beside each action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from benchmarks.peers.groot.head import (
    ActionEncoder,
    CategoryMlp,
    DiffusionBlock,
    TimestepEncoder,
)
from torch import Tensor, nn
from torch.nn.functional import silu


class DiffusionTransformer(nn.Module):
    """Alternating blocks: cross attention to the features, self-attention; no masks."""

    transformer_blocks: Any

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["input_embedding_dim"], config["num_attention_heads"]
        self.timestep_encoder = TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            DiffusionBlock(width, heads, None if i % 2 else config["cross_attention_dim"])
            for i in range(config["num_layers"])
        )
        self.norm_out = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, config["output_dim"])

    def forward(self, x: Tensor, features: Tensor, bucket: Tensor) -> Tensor:
        """x [B, T, W], features [B, S, F], bucket int [B] -> [B, T, out]."""
        level = self.timestep_encoder(bucket)
        for i, block in enumerate(self.transformer_blocks):
            pair = None if i % 2 else block.attn1.keys_values(features)
            x = block(x, level, keys_values=pair)
        shift, scale = self.proj_out_1(silu(level)).chunk(2, dim=1)
        y: Tensor = self.proj_out_2(self.norm_out(x) * (1 + scale[:, None]) + shift[:, None])
        return y


class ActionHead(nn.Module):
    """From the features of the language model, state and noise to actions.

    config: ``action_head_cfg`` of the checkpoint.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        c, dit = config, config["diffusion_model_cfg"]
        width, many, actions = (
            dit["input_embedding_dim"], c["max_num_embodiments"], c["action_dim"],
        )  # fmt: skip
        self.buckets = c["num_timestep_buckets"]
        self.action_encoder = ActionEncoder(many, actions + c["state_dim"], width)
        self.action_decoder = CategoryMlp(many, dit["output_dim"], c["hidden_size"], actions)
        self.future_tokens = nn.Embedding(c["num_target_vision_tokens"], width)
        self.position_embedding = nn.Embedding(c["max_seq_len"], width)
        self.model = DiffusionTransformer(dit)

    def predict(
        self, x: Tensor, features: Tensor, state: Tensor, embodiment: Tensor, bucket: int
    ) -> Tensor:
        """Return the clean actions [B, T, A] behind noisy ones; state [B, 1, D]."""
        rows, chunk = x.shape[:2]
        buckets = torch.full((rows,), bucket, dtype=torch.int64)
        beside = torch.cat([x, state.expand(-1, chunk, -1)], dim=2)
        tokens = self.action_encoder(beside, buckets, embodiment)
        tokens = tokens + self.position_embedding(torch.arange(chunk))[None]
        future = self.future_tokens.weight[None].expand(rows, -1, -1)
        out = self.model(torch.cat([future, tokens], dim=1), features, buckets)
        actions: Tensor = self.action_decoder(out, embodiment)[:, -chunk:]
        return actions

    def denoise(
        self, noise: Tensor, features: Tensor, state: Tensor, embodiment: Tensor, steps: int
    ) -> Tensor:
        """Return the actions [B, T, A] after ``steps`` predictions of the clean ones.

        The same noise is mixed in again before each.
        """
        clean = torch.zeros_like(noise)
        for left in range(steps, 0, -1):
            t = left / steps
            bucket = min(int(self.buckets * t), self.buckets - 1)
            x = t * noise + (1 - t) * clean
            clean = self.predict(x, features, state, embodiment, bucket)
        return clean
