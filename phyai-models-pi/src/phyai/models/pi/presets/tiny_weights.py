"""Weights of the tiny preset: random, but arranged so that its actions look like a motion.

The denoiser's channels have fixed roles. The noisy action passes through the residual stream
untouched and comes out as velocity ``GAIN * (x - target)``, so the solver contracts any noise
towards the target. The target is random: attention over cameras, prompt and state, whose rotary
angles keep the low frequencies only, so it changes smoothly along the chunk. Nothing is trained.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from phyai.models.pi.config import GemmaConfig, Model, SiglipConfig

Array = NDArray[np.float32]

VISION = SiglipConfig(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    image_size=112,
)
TEXT = GemmaConfig(
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=32,
    intermediate_size=192,
    vocab_size=1024,
)
EXPERT = GemmaConfig(
    hidden_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    head_dim=32,
    intermediate_size=128,
    vocab_size=1024,
)
ACTION_WIDTH = STATE_WIDTH = 32

GAIN = 3.0  # ten Euler steps leave (1 - 0.3)^10 = 3 % of the noise
# Residual channels of the expert: the noisy action, what the layers write, and a constant so
# large that the norms hardly depend on the rest.
_ACTION = slice(0, ACTION_WIDTH)
_FREE = slice(ACTION_WIDTH, EXPERT.hidden_size - 1)
_CONSTANT = EXPERT.hidden_size - 1
_HEIGHT = 16.0
_RMS = 1.75  # of the residual stream, measured
_FAST_PAIRS, _MEDIUM_PAIRS = 2, 6  # rotary pairs with periods below 20, and of 20 to 110 actions
_TARGET_SIZE = 0.45  # of the normalised range

_PALIGEMMA = "paligemma_with_expert.paligemma"
_TOWER = f"{_PALIGEMMA}.model.vision_tower.vision_model"
_LANGUAGE = f"{_PALIGEMMA}.model.language_model"
_EXPERT = "paligemma_with_expert.gemma_expert"


def tiny_weights(model: Model, seed: int = 0) -> dict[str, Array]:
    """Return every tensor of a released checkpoint of ``model`` at the tiny sizes, float32.

    Names carry no leading ``model.``; the token embedding is stored as ``lm_head`` alone.
    """
    draw = _Draw(f"{model}/{seed}")
    _vision(draw)
    _language(draw)
    _expert(draw, adaptive=model == "pi05")
    (_pi05_heads if model == "pi05" else _pi0_heads)(draw)
    return draw.tensors


class _Draw:
    """Collects tensors; the values of one depend on the seed and its name alone."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.tensors: dict[str, Array] = {}

    def normal(self, name: str, *shape: int, scale: float = 1.0) -> Array:
        """Add normals of standard deviation scale/sqrt(fan_in)."""
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        values = np.random.default_rng(list(digest)).standard_normal(shape)
        std = scale / math.sqrt(math.prod(shape[1:]))
        self.tensors[name] = (values * std).astype(np.float32)
        return self.tensors[name]

    def full(self, name: str, *shape: int, value: float = 0.0) -> Array:
        self.tensors[name] = np.full(shape, value, dtype=np.float32)
        return self.tensors[name]

    def linear(self, name: str, out: int, into: int, scale: float = 1.0) -> Array:
        """Add ``<name>.weight`` and a zero ``<name>.bias``; returns the weight."""
        self.full(f"{name}.bias", out)
        return self.normal(f"{name}.weight", out, into, scale=scale)

    def layer_norm(self, name: str, width: int) -> None:
        self.full(f"{name}.weight", width, value=1.0)
        self.full(f"{name}.bias", width)


def _vision(draw: _Draw) -> None:
    width, patch = VISION.hidden_size, VISION.patch_size
    table = f"{_TOWER}.embeddings"
    draw.normal(f"{table}.patch_embedding.weight", width, 3, patch, patch, scale=2.0)
    draw.full(f"{table}.patch_embedding.bias", width)
    draw.normal(f"{table}.position_embedding.weight", VISION.num_patches, width, scale=2.0)
    for i in range(VISION.num_hidden_layers):
        layer = f"{_TOWER}.encoder.layers.{i}"
        for norm in ("layer_norm1", "layer_norm2"):
            draw.layer_norm(f"{layer}.{norm}", width)
        for leg in ("q_proj", "k_proj", "v_proj", "out_proj"):
            draw.linear(f"{layer}.self_attn.{leg}", width, width)
        draw.linear(f"{layer}.mlp.fc1", VISION.intermediate_size, width)
        draw.linear(f"{layer}.mlp.fc2", width, VISION.intermediate_size)
    draw.layer_norm(f"{_TOWER}.post_layernorm", width)
    draw.linear(f"{_PALIGEMMA}.model.multi_modal_projector.linear", TEXT.hidden_size, width)


def _language(draw: _Draw) -> None:
    draw.normal(f"{_PALIGEMMA}.lm_head.weight", TEXT.vocab_size, TEXT.hidden_size)
    for i in range(TEXT.num_hidden_layers):
        layer = f"{_LANGUAGE}.layers.{i}"
        _decoder(draw, layer, TEXT)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            draw.full(f"{layer}.{norm}.weight", TEXT.hidden_size)
    draw.full(f"{_LANGUAGE}.norm.weight", TEXT.hidden_size)


def _decoder(draw: _Draw, layer: str, sizes: GemmaConfig) -> dict[str, Array]:
    width, mlp = sizes.hidden_size, sizes.intermediate_size
    query = sizes.num_attention_heads * sizes.head_dim
    keys = sizes.num_key_value_heads * sizes.head_dim
    shapes = {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (mlp, width),
        "mlp.up_proj": (mlp, width),
        "mlp.down_proj": (width, mlp),
    }
    return {leg: draw.normal(f"{layer}.{leg}.weight", *shape) for leg, shape in shapes.items()}


def _expert(draw: _Draw, *, adaptive: bool) -> None:
    width = EXPERT.hidden_size
    norms = [f"{_EXPERT}.model.norm"]
    for i in range(EXPERT.num_hidden_layers):
        layer = f"{_EXPERT}.model.layers.{i}"
        legs = _decoder(draw, layer, EXPERT)
        for leg in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            legs[leg][:, _ACTION] = 0.0
        for leg in ("mlp.gate_proj", "mlp.up_proj"):
            legs[leg][:, _ACTION] = 0.0
        for leg in ("self_attn.o_proj", "mlp.down_proj"):
            legs[leg][_ACTION] = 0.0
            legs[leg][_CONSTANT] = 0.0
        _slow_queries(legs["self_attn.q_proj"])
        legs["mlp.down_proj"] *= 0.5
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    for norm in norms:
        if adaptive:
            # scale, shift, gate: the gate is 1 at rest
            draw.linear(f"{norm}.dense", 3 * width, width, scale=0.2)
            draw.tensors[f"{norm}.dense.bias"][2 * width :] = 1.0
        else:
            draw.full(f"{norm}.weight", width)
    draw.normal(f"{_EXPERT}.lm_head.weight", EXPERT.vocab_size, width)


def _slow_queries(query: Array) -> None:
    """Make attention select few tokens, other ones as the action's place moves along the chunk."""
    half = EXPERT.head_dim // 2
    pair = np.arange(query.shape[0]) % EXPERT.head_dim % half
    query[pair < _FAST_PAIRS] = 0.0
    query[(pair >= _FAST_PAIRS) & (pair < _MEDIUM_PAIRS)] *= 4.0
    query[pair >= _MEDIUM_PAIRS] *= 1.5


def _action_heads(draw: _Draw) -> Array:
    """Add both action projections; returns the bias of the inner one."""
    width = EXPERT.hidden_size
    inner = draw.full("action_in_proj.weight", width, ACTION_WIDTH)
    np.fill_diagonal(inner[_ACTION], 1.0)
    offset = 0.3 * draw.normal("action_out_proj.bias", ACTION_WIDTH)
    draw.full("action_out_proj.bias", ACTION_WIDTH)
    outer = draw.normal("action_out_proj.weight", ACTION_WIDTH, width, scale=_TARGET_SIZE)
    outer[:, _ACTION] = -np.eye(ACTION_WIDTH, dtype=np.float32)
    outer[:, _CONSTANT] = offset * _TARGET_SIZE / _HEIGHT
    outer *= -GAIN * _RMS
    return draw.full("action_in_proj.bias", width)


def _pi05_heads(draw: _Draw) -> None:
    width = EXPERT.hidden_size
    _action_heads(draw)[_CONSTANT] = _HEIGHT
    draw.linear("time_mlp_in", width, width)
    draw.linear("time_mlp_out", width, width)


def _pi0_heads(draw: _Draw) -> None:
    width = EXPERT.hidden_size
    _action_heads(draw)
    state = draw.linear("state_proj", width, STATE_WIDTH, scale=10.0)
    state[_ACTION] = 0.0
    state[_CONSTANT] = 0.0
    draw.tensors["state_proj.bias"][_CONSTANT] = _HEIGHT
    # silu(z) - silu(-z) = z, so a pair of hidden units carries one action value through the mix.
    mix_in = draw.linear("action_time_mlp_in", width, 2 * width)
    mix_out = draw.linear("action_time_mlp_out", width, width)
    up, down = slice(0, ACTION_WIDTH), slice(ACTION_WIDTH, 2 * ACTION_WIDTH)
    eye = np.eye(ACTION_WIDTH, dtype=np.float32)
    mix_in[: 2 * ACTION_WIDTH] = 0.0
    mix_in[2 * ACTION_WIDTH :, :width] = 0.0
    mix_in[up, _ACTION], mix_in[down, _ACTION] = eye, -eye
    mix_out[_ACTION] = 0.0
    mix_out[_CONSTANT] = 0.0
    mix_out[:, : 2 * ACTION_WIDTH] = 0.0
    mix_out[_ACTION, up], mix_out[_ACTION, down] = eye, -eye
    draw.tensors["action_time_mlp_out.bias"][_CONSTANT] = _HEIGHT
