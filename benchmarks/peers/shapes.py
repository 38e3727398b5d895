"""Names and shapes of parts that several checkpoints hold, and usual random values for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

Shapes: TypeAlias = Iterator[tuple[str, tuple[int, ...]]]


def linear(name: str, out: int, into: int) -> Shapes:
    """A layer with bias."""
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def norm(name: str, width: int) -> Shapes:
    """A layer norm with bias."""
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def siglip(
    root: str, *, width: int, mlp: int, layers: int, channels: int, patch: int, places: int
) -> Shapes:
    """A vision tower; places: rows of its position table."""
    yield f"{root}.embeddings.patch_embedding.weight", (width, channels, patch, patch)
    yield f"{root}.embeddings.patch_embedding.bias", (width,)
    yield f"{root}.embeddings.position_embedding.weight", (places, width)
    for i in range(layers):
        layer = f"{root}.encoder.layers.{i}"
        yield from norm(f"{layer}.layer_norm1", width)
        yield from norm(f"{layer}.layer_norm2", width)
        yield from attention(f"{layer}.self_attn", width)
        yield from linear(f"{layer}.mlp.fc1", mlp, width)
        yield from linear(f"{layer}.mlp.fc2", width, mlp)
    yield from norm(f"{root}.post_layernorm", width)


def attention(owner: str, width: int) -> Shapes:
    """Attention of a vision tower."""
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from linear(f"{owner}.{name}", width, width)


def grouped_attention(
    layer: str, width: int, queries: int, keys: int, *, gated: bool = False
) -> Shapes:
    """Attention of a decoder layer; gated: queries come with a gate of the same size."""
    yield f"{layer}.self_attn.q_proj.weight", (queries * (2 if gated else 1), width)
    yield f"{layer}.self_attn.k_proj.weight", (keys, width)
    yield f"{layer}.self_attn.v_proj.weight", (keys, width)
    yield f"{layer}.self_attn.o_proj.weight", (width, queries)


def head_norms(layer: str, head: int) -> Shapes:
    """Norms of a decoder layer's queries and keys."""
    yield f"{layer}.self_attn.q_norm.weight", (head,)
    yield f"{layer}.self_attn.k_norm.weight", (head,)


def gated_mlp(layer: str, width: int, mlp: int) -> Shapes:
    """The MLP of a decoder layer."""
    yield f"{layer}.mlp.gate_proj.weight", (mlp, width)
    yield f"{layer}.mlp.up_proj.weight", (mlp, width)
    yield f"{layer}.mlp.down_proj.weight", (width, mlp)


def layer_norms(layer: str, width: int) -> Shapes:
    """Norms in front of a decoder layer's attention and MLP."""
    yield f"{layer}.input_layernorm.weight", (width,)
    yield f"{layer}.post_attention_layernorm.weight", (width,)


# ---------------------------------------------------------------- diffusion heads


def category(name: str, many: int, into: int, out: int) -> Shapes:
    """A layer with one bank of weights per embodiment."""
    yield f"{name}.W", (many, into, out)
    yield f"{name}.b", (many, out)


def action_coders(
    root: str, *, many: int, into: int, width: int, hidden: int, out: int, actions: int
) -> Shapes:
    """Encoder of noisy actions and decoder of the transformer's output, per embodiment."""
    yield from category(f"{root}.action_encoder.W1", many, into, width)
    yield from category(f"{root}.action_encoder.W2", many, 2 * width, width)
    yield from category(f"{root}.action_encoder.W3", many, width, width)
    yield from category(f"{root}.action_decoder.layer1", many, out, hidden)
    yield from category(f"{root}.action_decoder.layer2", many, hidden, actions)


def transformer_block(block: str, width: int, source: int) -> Shapes:
    """Attention over ``source`` wide keys and the MLP of one block of a head."""
    yield from linear(f"{block}.attn1.to_q", width, width)
    yield from linear(f"{block}.attn1.to_k", width, source)
    yield from linear(f"{block}.attn1.to_v", width, source)
    yield from linear(f"{block}.attn1.to_out.0", width, width)
    yield from linear(f"{block}.ff.net.0.proj", 4 * width, width)
    yield from linear(f"{block}.ff.net.2", width, 4 * width)


def diffusion_transformer(root: str, *, layers: int, width: int, feature: int, out: int) -> Shapes:
    """Blocks that attend to ``feature`` wide tokens and to themselves in turn."""
    embedder = f"{root}.timestep_encoder.timestep_embedder"
    yield from linear(f"{embedder}.linear_1", width, 256)
    yield from linear(f"{embedder}.linear_2", width, width)
    for i in range(layers):
        block = f"{root}.transformer_blocks.{i}"
        yield from linear(f"{block}.norm1.linear", 2 * width, width)
        yield from transformer_block(block, width, width if i % 2 else feature)
    yield from linear(f"{root}.proj_out_1", 2 * width, width)
    yield from linear(f"{root}.proj_out_2", out, width)


def usual_moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and deviation of whatever is no norm, so that activations stay of order one."""
    owner, _, leaf = name.rpartition(".")
    if leaf in ("bias", "b"):
        return 0.0, 0.05
    if owner.endswith(("position_embedding", "pos_embed", "future_tokens")):
        return 0.0, 0.5
    if owner.endswith("embed_tokens"):
        return 0.0, 1.0
    # Weights per embodiment are [E, in, out], all others [out, in, ...].
    fan_in = shape[1] if leaf == "W" else math.prod(shape[1:])
    return 0.0, 1.0 / math.sqrt(fan_in)
