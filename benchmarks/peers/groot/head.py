"""The action head of GR00T N1.7 as the official code runs it, from its mathematics.

Blocks have the parameters and the products of diffusers' attention and feed-forward modules, which
the official code uses. In every step it runs both timestep embeddings, all modulations, K and V of
every cross attention, the gathering of the embodiments' weights, and the decoding of the state
token; masks cover the keys that a block may not see, none are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

KeysValues = dict[int, tuple[Tensor, Tensor]]


def rounded_exp(exponent: Tensor) -> Tensor:
    """Return e^exponent in float32, correctly rounded, where vector units differ between machines.

    Angles reach 1000 rad: one last bit of a frequency is 5e-5 of its cosine.
    """
    return exponent.double().exp().float()


class Attention(nn.Module):
    """Multi-head attention with biases; keys and values from ``source``, else from x itself."""

    def __init__(self, width: int, heads: int, source: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(source, width)
        self.to_v = nn.Linear(source, width)
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def keys_values(self, source: Tensor) -> tuple[Tensor, Tensor]:
        return self._split(self.to_k(source)), self._split(self.to_v(source))

    def forward(
        self, x: Tensor, keys_values: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """x [B, T, W]; keys and values [B, heads, S, D]; mask bool [B, S], true where seen."""
        if mask is not None:
            mask = mask.repeat_interleave(self.heads, dim=0).view(len(x), self.heads, 1, -1)
        y = scaled_dot_product_attention(self._split(self.to_q(x)), *keys_values, attn_mask=mask)
        out: Tensor = self.to_out[0](y.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Projection(nn.Module):
    """GELU (tanh) behind a linear."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        # The identity stands where the official module drops out in training.
        self.net = nn.Sequential(
            Projection(width, 4 * width), nn.Identity(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y


class ModulatedNorm(nn.Module):
    """y = LN(x) (1 + scale) + shift, both from the noise level."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, 1e-5, elementwise_affine=False)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        scale, shift = self.linear(silu(level)).chunk(2, dim=1)
        y: Tensor = self.norm(x) * (1 + scale[:, None]) + shift[:, None]
        return y


class VisionLanguageBlock(nn.Module):
    """Self-attention over the backbone's features, without mask or positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, 1e-5)
        self.attn1 = Attention(width, heads, width)
        self.norm3 = nn.LayerNorm(width, 1e-5)
        self.ff = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = self.attn1(y, self.attn1.keys_values(y)) + x
        out: Tensor = self.ff(self.norm3(x)) + x
        return out


class VisionLanguageStack(nn.Module):
    transformer_blocks: Any

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(
            VisionLanguageBlock(width, heads) for _ in range(layers)
        )


class DiffusionBlock(nn.Module):
    """Self-attention over the suffix, or cross attention to ``source`` wide features."""

    def __init__(self, width: int, heads: int, source: int | None) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(width)
        self.attn1 = Attention(width, heads, source or width)
        self.norm3 = nn.LayerNorm(width, 1e-5, elementwise_affine=False)
        self.ff = FeedForward(width)

    def forward(
        self,
        x: Tensor,
        level: Tensor,
        mask: Tensor | None = None,
        keys_values: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        y = self.norm1(x, level)
        x = self.attn1(y, keys_values or self.attn1.keys_values(y), mask) + x
        out: Tensor = self.ff(self.norm3(x)) + x
        return out


class TimestepMlp(nn.Module):
    def __init__(self, waves: int, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(waves, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, waves: Tensor) -> Tensor:
        y: Tensor = self.linear_2(silu(self.linear_1(waves.to(self.linear_1.weight.dtype))))
        return y


class TimestepEncoder(nn.Module):
    """The noise level as the DiT sees it: cosines, then sines, of the bucket, and an MLP."""

    def __init__(self, width: int, waves: int = 256) -> None:
        super().__init__()
        self.waves = waves
        self.timestep_embedder = TimestepMlp(waves, width)

    def forward(self, bucket: Tensor) -> Tensor:
        """bucket int [B] -> [B, W]."""
        half = self.waves // 2
        exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32) / (half - 1)
        angle = bucket[:, None].float() * rounded_exp(exponent)
        y: Tensor = self.timestep_embedder(torch.cat([angle.cos(), angle.sin()], dim=1))
        return y


class DiffusionTransformer(nn.Module):
    """Alternating blocks: cross attention to text or image tokens, self-attention."""

    transformer_blocks: Any

    def __init__(self, width: int, source: int, config: Mapping[str, Any], every: int) -> None:
        super().__init__()
        heads = config["num_attention_heads"]
        self.every = every
        self.timestep_encoder = TimestepEncoder(width)
        self.transformer_blocks = nn.ModuleList(
            DiffusionBlock(width, heads, None if i % 2 else source)
            for i in range(config["num_layers"])
        )
        self.norm_out = nn.LayerNorm(width, 1e-6, elementwise_affine=False)
        self.proj_out_1 = nn.Linear(width, 2 * width)
        self.proj_out_2 = nn.Linear(width, config["output_dim"])

    def forward(
        self,
        x: Tensor,
        features: Tensor,
        image_mask: Tensor,
        valid: Tensor,
        bucket: Tensor,
        kept: KeysValues | None,
    ) -> Tensor:
        """x [B, T, W], features [B, S, F], masks bool [B, S], bucket int [B] -> [B, T, out].

        kept: keys and values of the cross blocks, filled on the first call of a request.
        """
        level = self.timestep_encoder(bucket)
        images, texts = image_mask & valid, ~image_mask & valid
        for i, block in enumerate(self.transformer_blocks):
            if i % 2:
                x = block(x, level)
                continue
            mask = images if i % (2 * self.every) else texts
            pair = None if kept is None else kept.get(i)
            if pair is None:
                pair = block.attn1.keys_values(features)
                if kept is not None:
                    kept[i] = pair
            x = block(x, level, mask, pair)
        shift, scale = self.proj_out_1(silu(level)).chunk(2, dim=1)
        y: Tensor = self.proj_out_2(self.norm_out(x) * (1 + scale[:, None]) + shift[:, None])
        return y


class CategoryLinear(nn.Module):
    """x W[e] + b[e]; the weights of a row are gathered in every call."""

    def __init__(self, many: int, into: int, out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(many, into, out))
        self.b = nn.Parameter(torch.empty(many, out))

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        return torch.bmm(x, self.W[embodiment]) + self.b[embodiment][:, None]


class CategoryMlp(nn.Module):
    def __init__(self, many: int, into: int, hidden: int, out: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(many, into, hidden)
        self.layer2 = CategoryLinear(many, hidden, out)

    def forward(self, x: Tensor, embodiment: Tensor) -> Tensor:
        y: Tensor = self.layer2(relu(self.layer1(x, embodiment)), embodiment)
        return y


class ActionEncoder(nn.Module):
    """Actions and the noise level as tokens."""

    def __init__(self, many: int, actions: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = CategoryLinear(many, actions, width)
        self.W2 = CategoryLinear(many, 2 * width, width)
        self.W3 = CategoryLinear(many, width, width)

    def forward(self, x: Tensor, bucket: Tensor, embodiment: Tensor) -> Tensor:
        """x [B, T, A], bucket int [B], embodiment int [B] -> [B, T, W]."""
        tokens = self.W1(x, embodiment)
        half = self.width // 2
        exponent = -torch.arange(half, dtype=torch.float32) * (math.log(10000.0) / half)
        levels = bucket[:, None].expand(-1, x.shape[1])[..., None].float()
        angle = levels * rounded_exp(exponent)
        waves = torch.cat([angle.sin(), angle.cos()], dim=2).to(tokens.dtype)
        y = silu(self.W2(torch.cat([tokens, waves], dim=2), embodiment))
        out: Tensor = self.W3(y, embodiment)
        return out


class ActionHead(nn.Module):
    """From the backbone's features, state and noise to actions.

    config: that of the checkpoint.  keep_keys: compute K and V of cross attention once a request,
    as newer official code does.
    """

    def __init__(self, config: Mapping[str, Any], *, keep_keys: bool = False) -> None:
        super().__init__()
        c, feature = config, config["backbone_embedding_dim"]
        width, many = c["input_embedding_dim"], c["max_num_embodiments"]
        dit, vlsa = c["diffusion_model_cfg"], c["vl_self_attention_cfg"]
        state = c["max_state_dim"] * c["state_history_length"]
        self.keep_keys, self.buckets = keep_keys, c["num_timestep_buckets"]
        self.vlln = nn.LayerNorm(feature, 1e-5)
        self.vl_self_attention = VisionLanguageStack(
            feature, vlsa["num_attention_heads"], vlsa["num_layers"]
        )
        self.state_encoder = CategoryMlp(many, state, c["hidden_size"], width)
        self.action_encoder = ActionEncoder(many, c["max_action_dim"], width)
        self.action_decoder = CategoryMlp(
            many, dit["output_dim"], c["hidden_size"], c["max_action_dim"]
        )
        self.position_embedding = nn.Embedding(c["max_seq_len"], width)
        self.model = DiffusionTransformer(width, feature, dit, c["attend_text_every_n_blocks"])

    def project(self, features: Tensor) -> Tensor:
        """Return the features the DiT reads; pads, where there are any, take part."""
        x: Tensor = self.vlln(features)
        for block in self.vl_self_attention.transformer_blocks:
            x = block(x)
        return x

    def denoise(
        self,
        noise: Tensor,
        features: Tensor,
        image_mask: Tensor,
        valid: Tensor,
        state: Tensor,
        embodiment: Tensor,
        steps: int,
    ) -> Tensor:
        """Return the actions [B, T, A] in the dtype of the noise after ``steps`` Euler steps."""
        token = self.state_encoder(state.flatten(1)[:, None], embodiment)
        x = noise
        kept: KeysValues | None = {} if self.keep_keys else None
        chunk = noise.shape[1]
        for step in range(steps):
            bucket = torch.full((len(x),), int(step / steps * self.buckets), dtype=torch.int64)
            tokens = self.action_encoder(x, bucket, embodiment)
            tokens = tokens + self.position_embedding(torch.arange(chunk))[None]
            suffix = torch.cat([token, tokens], dim=1)
            out = self.model(suffix, features, image_mask, valid, bucket, kept)
            x = x + 1.0 / steps * self.action_decoder(out, embodiment)[:, -chunk:]
        return x
