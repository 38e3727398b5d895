"""Operations and bytes of each stage of pi0 and pi0.5, from the sizes alone. Torch-free.

Two accounts. "published": what the architecture describes - every layer in full, the state token
at every step - without norms, activations and modulation. "computed": what this runtime runs - no
padding, K/V only in the last prefix layer, tables instead of time networks, the state token once
per request. Both count valid tokens only, a multiply-add as two.
"""

from __future__ import annotations

from dataclasses import dataclass

from phyai.cost import StageCost, Workload
from phyai.models.pi.config import GemmaConfig, PiConfig, SiglipConfig

FLOAT32 = 4


def stage_costs(
    config: PiConfig, workload: Workload, *, published: bool, itemsize: int
) -> list[StageCost]:
    """Return vision, prefix, state (computed account of pi0) and loop, in the order they run.

    itemsize: bytes of a weight of the towers and of a cached number; heads and tables are float32.
    """
    sizes = _Sizes(config, workload, itemsize)
    stages = [_vision(sizes), _prefix(sizes, published)]
    if config.model == "pi0" and not published:
        stages.append(_state(sizes))
    return [*stages, _loop(sizes, published)]


@dataclass(frozen=True, slots=True)
class _Sizes:
    config: PiConfig
    work: Workload
    itemsize: int

    @property
    def images(self) -> int:
        return self.work.rows * self.work.cameras

    @property
    def prefix(self) -> int:
        """Valid prefix tokens of one row."""
        return self.work.cameras * self.config.num_image_tokens + self.work.tokens

    @property
    def state_tokens(self) -> int:
        return 1 if self.config.model == "pi0" else 0

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in all layers."""
        text = self.config.text
        width = text.num_key_value_heads * text.head_dim
        return 2 * width * text.num_hidden_layers * self.itemsize


# ---------------------------------------------------------------- products of one token


def _attention_weights(c: GemmaConfig) -> int:
    """Weights of q, k, v and output projections."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    return c.hidden_size * (2 * q + 2 * kv)


def _kv_weights(c: GemmaConfig) -> int:
    return c.hidden_size * 2 * c.num_key_value_heads * c.head_dim


def _mlp_weights(c: GemmaConfig) -> int:
    return 3 * c.hidden_size * c.intermediate_size


def _layer_weights(c: GemmaConfig) -> int:
    return _attention_weights(c) + _mlp_weights(c)


def _attention_flops(c: GemmaConfig, queries: int, keys: int) -> int:
    """Scores and weighted values of one layer and one row."""
    return 4 * queries * keys * c.num_attention_heads * c.head_dim


# ---------------------------------------------------------------- stages


def _vision(s: _Sizes) -> StageCost:
    c: SiglipConfig = s.config.vision
    patches, width = c.num_patches, c.hidden_size
    pixels = c.num_channels * c.patch_size**2
    layer = 4 * width**2 + 2 * width * c.intermediate_size
    weights = c.num_hidden_layers * layer
    projector = width * s.config.text.hidden_size
    per_image = 2 * patches * (pixels * width + weights + projector)
    per_image += c.num_hidden_layers * 4 * patches**2 * width
    image_bytes = FLOAT32 * c.num_channels * c.image_size**2
    feature_bytes = s.itemsize * patches * s.config.text.hidden_size
    used = s.itemsize * (weights + projector) + FLOAT32 * (pixels + patches) * width
    return StageCost(
        "vision",
        "encode/vision",
        s.images * per_image,
        used if s.images else 0,
        s.images * (image_bytes + feature_bytes),
        "patches, tower and projector",
    )


def _prefix(s: _Sizes, published: bool) -> StageCost:
    c, tokens = s.config.text, s.prefix
    full = c.num_hidden_layers - (0 if published else 1)
    weights = full * _layer_weights(c) + (0 if published else _kv_weights(c))
    per_row = 2 * tokens * weights + full * _attention_flops(c, tokens, tokens)
    embedded = s.work.tokens * c.hidden_size * s.itemsize
    return StageCost(
        "prefix",
        "encode/prefix",
        s.work.rows * per_row,
        s.itemsize * weights,
        s.work.rows * (embedded + tokens * s.kv_token_bytes),
        "all layers in full" if published else "last layer: K and V only",
    )


def _state(s: _Sizes) -> StageCost:
    """The state token of pi0: it sees the prefix and itself, so once per request is enough."""
    c, seen = s.config.expert, s.prefix + 1
    layers = c.num_hidden_layers - 1
    weights = layers * _layer_weights(c) + _kv_weights(c)
    head = s.config.max_state_dim * c.hidden_size
    per_row = 2 * (weights + head) + layers * _attention_flops(c, 1, seen)
    return StageCost(
        "state",
        "encode/state",
        s.work.rows * per_row,
        s.itemsize * weights + FLOAT32 * head,
        s.work.rows * seen * s.kv_token_bytes,
        "once per request; last layer: K and V only",
    )


def _loop(s: _Sizes, published: bool) -> StageCost:
    c, actions, steps = s.config.expert, s.config.chunk_size, s.work.steps
    queries = actions + (s.state_tokens if published else 0)
    keys = s.prefix + s.state_tokens + actions
    layers = c.num_hidden_layers * _layer_weights(c)
    head, state_head = _head_weights(s.config, published)
    per_row = 2 * (queries * layers + actions * head + state_head)
    per_row += c.num_hidden_layers * _attention_flops(c, queries, keys)
    step_bytes = s.work.rows * keys * s.kv_token_bytes + (0 if published else _table_bytes(c, s))
    return StageCost(
        "loop",
        "solve",
        steps * s.work.rows * per_row,
        steps * (s.itemsize * layers + FLOAT32 * (head + state_head)),
        steps * step_bytes,
        "without modulation and time networks" if published else "tables over steps",
    )


def _head_weights(config: PiConfig, published: bool) -> tuple[int, int]:
    """Return weights per action token, and those used once per row and step."""
    width, action = config.expert.hidden_size, config.max_action_dim
    heads = 2 * action * width
    if config.model == "pi05":
        return heads, 0
    if published:  # the action and the time half, the second layer, the state projection
        return heads + 3 * width**2, config.max_state_dim * width
    return heads + 2 * width**2, 0


def _table_bytes(c: GemmaConfig, s: _Sizes) -> int:
    """Bytes of one step's row of the tables."""
    rows = 3 * (2 * c.num_hidden_layers + 1) if s.config.model == "pi05" else 1
    return FLOAT32 * rows * c.hidden_size
