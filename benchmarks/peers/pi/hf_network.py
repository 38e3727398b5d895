"""The official wiring of pi0 and pi0.5, coded from its mathematics on the modules of transformers.

One network serves the eager and compiled peers and the OpenVINO export. It does what the official
code does each time it does it: masks are built per call, K/V heads are repeated, the last language
layer runs whole; the time MLP, all adaRMS projections (pi0.5), the state token and the MLP over
action and time (pi0) run in every step.

Dtypes. fp32: everything. bf16, as LeRobot 0.6.1 ships it: token embedding and all linears of the
two decoder stacks bfloat16; vision tower, projector, norms, adaRMS projections and heads float32.
``bf16_vision`` (as openpi) also runs the tower but its two embeddings, and the projector, in
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from benchmarks.peers.pi.sizes import (
    EXPERT,
    LANGUAGE,
    LM_HEAD,
    PROJECTOR,
    TOWER,
    Decoder,
    PiSizes,
)
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import GemmaConfig, SiglipVisionConfig  # type: ignore[import-not-found]
from transformers.models.gemma.modeling_gemma import (  # type: ignore[import-not-found]
    GemmaAttention,
    GemmaMLP,
    GemmaRMSNorm,
    GemmaRotaryEmbedding,
)
from transformers.models.siglip.modeling_siglip import (  # type: ignore[import-not-found]
    SiglipVisionModel,
)

MASKED = -2.3819763e38
"""Added to the scores of masked pairs; finite, so a fully masked row stays a number."""

KeysValues = list[tuple[Tensor, Tensor]]

_RENAMED = (
    (f"{TOWER}.", "vision.vision_model."),
    (f"{PROJECTOR}.", "projector."),
    (f"{LANGUAGE}.embed_tokens.", "embedding."),
    (LM_HEAD, "embedding.weight"),
    (f"{LANGUAGE}.", "language."),
    (f"{EXPERT}.", "expert."),
)


def parameter_name(key: str) -> str:
    """Return the name here of a checkpoint key without its leading ``model.``."""
    for old, new in _RENAMED:
        if key.startswith(old):
            return new + key[len(old) :]
    return key


def parameter_dtype(name: str, dtype: str, *, bf16_vision: bool) -> torch.dtype:
    """Return the dtype of a parameter under the rules above."""
    if dtype == "fp32":
        return torch.float32
    if name.startswith(("vision.", "projector.")):
        return torch.bfloat16 if bf16_vision and ".embeddings." not in name else torch.float32
    narrow = name.startswith("embedding.") or ("self_attn" in name or ".mlp." in name)
    return torch.bfloat16 if narrow else torch.float32


class PrefixCache:
    """Keys and values of the prefix, and how a layer joins its own to them.

    As a cache of transformers to the attention modules. Filling keeps what it is given; reading
    concatenates, and never grows.
    """

    def __init__(self, filled: KeysValues | None = None) -> None:
        self.reading = filled is not None
        self.layers: KeysValues = [] if filled is None else filled

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        if not self.reading:
            self.layers.append((keys, values))
            return keys, values
        before = self.layers[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)


class AdaptiveNorm(nn.Module):
    """y = x rsqrt(mean(x^2) + eps) (1 + scale) + shift, and the gate of the sub-layer behind it."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, cond: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, W]; cond [B, W] float32. Computed in float32, returned in the dtype of x."""
        wide = x.float()
        scale, shift, gate = self.dense(cond)[:, None].chunk(3, dim=-1)
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normal * (1.0 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class LanguageLayer(nn.Module):
    """A layer with ordinary norms; pi0's expert has the same, so ``cond`` is taken and not read."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(config, index)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rope: Any,
        mask: Tensor | None,
        cache: PrefixCache,
        cond: Tensor | None = None,
    ) -> Tensor:
        normal = self.input_layernorm(x)
        x = x + self.self_attn(normal, rope, mask, cache)[0]
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class AdaptiveLayer(nn.Module):
    """A layer of pi0.5's expert."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(config, index)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Any, mask: Tensor | None, cache: PrefixCache, cond: Tensor
    ) -> Tensor:
        normal, gate = self.input_layernorm(x, cond)
        x = x + gate * self.self_attn(normal, rope, mask, cache)[0]
        normal, gate = self.post_attention_layernorm(x, cond)
        y: Tensor = x + gate * self.mlp(normal)
        return y


class Stack(nn.Module):
    """The layers of one decoder and its final norm."""

    layers: Any
    norm: Any

    def __init__(self, layers: Iterable[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class OfficialPi(nn.Module):
    """What both networks share; build one with ``hf_load.load``.

    attention: ``eager`` as the official code sets it for the decoders, or ``sdpa`` for an export.
    """

    def __init__(self, sizes: PiSizes, attention: str = "eager") -> None:
        super().__init__()
        text, expert = _gemma(sizes.text, attention), _gemma(sizes.expert, attention)
        self.sizes = sizes
        self.vision = SiglipVisionModel(_siglip(sizes))
        self.projector = nn.Linear(sizes.vision.hidden_size, sizes.text.hidden_size)
        self.embedding = nn.Embedding(sizes.text.vocab_size, sizes.text.hidden_size)
        depth = range(sizes.text.num_hidden_layers)
        self.language = Stack(
            (LanguageLayer(text, i) for i in depth),
            GemmaRMSNorm(text.hidden_size, eps=text.rms_norm_eps),
        )
        width = sizes.expert.hidden_size
        self.expert = Stack((self.expert_layer(expert, i) for i in depth), self.last_norm(expert))
        self.action_in_proj = nn.Linear(sizes.action_dim, width)
        self.action_out_proj = nn.Linear(width, sizes.action_dim)
        for layer in (*self.language.layers, *self.expert.layers):
            layer.self_attn.is_causal = False  # read only where no mask is given

    def expert_layer(self, config: Any, index: int) -> nn.Module:
        raise NotImplementedError

    def last_norm(self, config: Any) -> nn.Module:
        raise NotImplementedError

    def build_rotary(self) -> None:
        """Make the rotary table; it is computed, so it cannot wait on the meta device."""
        self.rotary = GemmaRotaryEmbedding(_gemma(self.sizes.text, "eager"))

    @property
    def stack_dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    # ------------------------------------------------------------ the three stages

    def embed_images(self, images: Tensor) -> list[Tensor]:
        """Return one [B, P, W] per camera of images [B, C, 3, S, S], one camera after another."""
        return [self._embed_image(image) for image in images.unbind(1)]

    def _embed_image(self, image: Tensor) -> Tensor:
        tower = self.vision.vision_model
        x = tower.embeddings(image).to(self.projector.weight.dtype)
        x = tower.post_layernorm(tower.encoder(inputs_embeds=x).last_hidden_state)
        y: Tensor = self.projector(x)
        return y

    def prefill(
        self, features: list[Tensor], image_masks: Tensor, tokens: Tensor, token_mask: Tensor
    ) -> tuple[KeysValues, Tensor]:
        """Return keys and values per layer, and which prefix positions [B, S] are valid."""
        words = self.embedding(tokens)
        words = words * torch.tensor(math.sqrt(words.shape[-1])).to(words.dtype)
        patches = self.sizes.vision.patches
        valid = torch.cat([image_masks.repeat_interleave(patches, dim=1), token_mask], dim=1)
        x = torch.cat([*features, words], dim=1).to(self.stack_dtype)
        mask = additive(valid[:, None, :] & valid[:, :, None])
        rope = self.rotary(x, valid.cumsum(1) - 1)
        cache = PrefixCache()
        for layer in self.language.layers:
            x = layer(x, rope, mask, cache)
        self.language.norm(x)  # the official forward returns it; nobody reads it here
        return cache.layers, valid

    def denoise(
        self,
        noise: Tensor,
        prefix: KeysValues,
        valid: Tensor,
        steps: int,
        state: Tensor | None = None,
    ) -> Tensor:
        """Return the actions [B, T, A] float32 after ``steps`` Euler steps from the noise."""
        x, dt = noise, -1.0 / steps
        for k in range(steps):
            time = torch.tensor(1.0 + k * dt, dtype=torch.float32).expand(noise.shape[0])
            x = x + dt * self.velocity(x, time, prefix, valid, state)
        return x

    def velocity(
        self, x: Tensor, time: Tensor, prefix: KeysValues, valid: Tensor, state: Tensor | None
    ) -> Tensor:
        """Return v(x, t); x [B, T, A] float32, time [B] float32, state [B, D] float32 (pi0)."""
        raise NotImplementedError

    def run_expert(
        self, suffix: Tensor, cond: Tensor | None, blocks: Tensor, prefix: KeysValues, valid: Tensor
    ) -> Tensor:
        """Return the expert's hidden states [B, n, W] before its final norm.

        suffix [B, n, W]; blocks int [n]: a position sees the positions of no later block.
        """
        rows, length = suffix.shape[:2]
        own = blocks[None, :] <= blocks[:, None]
        seen = torch.cat(
            [valid[:, None, :].expand(rows, length, -1), own.expand(rows, -1, -1)], dim=2
        )
        mask = additive(seen)
        hidden = suffix.to(self.stack_dtype)
        positions = valid.sum(1, keepdim=True) + torch.arange(length, device=suffix.device)
        rope, cache = self.rotary(hidden, positions), PrefixCache(prefix)
        for layer in self.expert.layers:
            hidden = layer(hidden, rope, mask, cache, cond)
        return hidden

    def forward(
        self, images: Tensor, image_masks: Tensor, tokens: Tensor, token_mask: Tensor,
        noise: Tensor, steps: int, state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the actions of one request; see ``batch.Batch`` for the shapes."""
        features = self.embed_images(images)
        prefix, valid = self.prefill(features, image_masks, tokens, token_mask)
        return self.denoise(noise, prefix, valid, steps, state)


class OfficialPi05(OfficialPi):
    """The noise level conditions every norm of the expert."""

    def __init__(self, sizes: PiSizes, attention: str = "eager") -> None:
        super().__init__(sizes, attention)
        width = sizes.expert.hidden_size
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def expert_layer(self, config: Any, index: int) -> nn.Module:
        return AdaptiveLayer(config, index)

    def last_norm(self, config: Any) -> nn.Module:
        return AdaptiveNorm(config.hidden_size, config.rms_norm_eps)

    def velocity(
        self, x: Tensor, time: Tensor, prefix: KeysValues, valid: Tensor, state: Tensor | None
    ) -> Tensor:
        cond = self.condition(time)
        blocks = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
        hidden = self.run_expert(self.action_in_proj(x), cond, blocks, prefix, valid)
        hidden, _ = self.expert.norm(hidden, cond)
        v: Tensor = self.action_out_proj(hidden.float())
        return v

    def condition(self, time: Tensor) -> Tensor:
        """Return the conditioning vector [B, W] of adaRMS; time [B] float32."""
        embedded = time_embedding(time, self.time_mlp_in.in_features, self.sizes)
        return silu(self.time_mlp_out(silu(self.time_mlp_in(embedded))))


class OfficialPi0(OfficialPi):
    """The noise level is mixed into every action; a state token stands before them."""

    def __init__(self, sizes: PiSizes, attention: str = "eager") -> None:
        super().__init__(sizes, attention)
        width = sizes.expert.hidden_size
        self.state_proj = nn.Linear(sizes.state_dim, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def expert_layer(self, config: Any, index: int) -> nn.Module:
        return LanguageLayer(config, index)

    def last_norm(self, config: Any) -> nn.Module:
        norm: nn.Module = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        return norm

    def velocity(
        self, x: Tensor, time: Tensor, prefix: KeysValues, valid: Tensor, state: Tensor | None
    ) -> Tensor:
        assert state is not None
        chunk, width = x.shape[1], self.sizes.expert.hidden_size
        level = time_embedding(time, width, self.sizes)[:, None].expand(-1, chunk, -1)
        mixed = self.action_time_mlp_in(torch.cat([self.action_in_proj(x), level], dim=2))
        actions = self.action_time_mlp_out(silu(mixed))
        suffix = torch.cat([self.state_proj(state)[:, None], actions], dim=1)
        blocks = torch.ones(1 + chunk, dtype=torch.int64, device=x.device)
        blocks[0] = 0  # the state sees itself, the actions see all
        hidden = self.expert.norm(self.run_expert(suffix, None, blocks, prefix, valid))
        v: Tensor = self.action_out_proj(hidden[:, -chunk:].float())
        return v


NETWORKS: dict[str, type[OfficialPi]] = {"pi0": OfficialPi0, "pi05": OfficialPi05}


def additive(allowed: Tensor) -> Tensor:
    """Return the float32 mask [B, 1, Q, K] to add to scores, from bool [B, Q, K]."""
    return torch.where(allowed[:, None], 0.0, MASKED)


def time_embedding(time: Tensor, width: int, sizes: PiSizes) -> Tensor:
    """Return sines, then cosines, [B, width] float32; computed in float64 as the official code."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64, device=time.device)
    period = sizes.min_period * (sizes.max_period / sizes.min_period) ** fraction
    angle = time.double()[:, None] * (2 * math.pi / period)[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=1).float()


def _gemma(d: Decoder, attention: str) -> Any:
    config = GemmaConfig(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        num_hidden_layers=d.num_hidden_layers,
        num_attention_heads=d.num_attention_heads,
        num_key_value_heads=d.num_key_value_heads,
        head_dim=d.head_dim,
        intermediate_size=d.intermediate_size,
        rms_norm_eps=d.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": d.rope_theta},
        hidden_act="gelu_pytorch_tanh",
        attention_bias=False,
    )
    config._attn_implementation = attention
    return config


def _siglip(sizes: PiSizes) -> Any:
    v = sizes.vision
    config = SiglipVisionConfig(
        hidden_size=v.hidden_size,
        num_hidden_layers=v.num_hidden_layers,
        num_attention_heads=v.num_attention_heads,
        intermediate_size=v.intermediate_size,
        patch_size=v.patch_size,
        image_size=v.image_size,
        num_channels=v.num_channels,
        layer_norm_eps=v.layer_norm_eps,
        hidden_act="gelu_pytorch_tanh",
        vision_use_head=False,
    )
    config._attn_implementation = "sdpa"  # what transformers chooses for the tower
    return config
