"""Operations and bytes of each stage of GR00T N1.7, from the sizes alone. Torch-free.

Two accounts. "published": what the architecture describes - the state token decoded, keys and
values of the backbone's tokens and all modulations at every step. "computed": what this runtime
runs. Both count valid tokens only, a multiply-add as two, and leave norms and activations out.
"""

from __future__ import annotations

from dataclasses import dataclass

from phyai.cost import StageCost, Workload
from phyai.models.gr00t.config import GrootConfig

FLOAT32 = 4
IMAGE_SIDE = 256
"""Pixels of a prepared image, each way."""
TIME_CHANNELS = 256


def stage_costs(
    config: GrootConfig, workload: Workload, *, published: bool, itemsize: int
) -> list[StageCost]:
    """Return vision, text, vl, head and loop, in the order they run.

    itemsize: bytes of a weight and of a cached number; tables are float32.
    """
    sizes = _Sizes(config, workload, itemsize)
    return [
        _vision(sizes),
        _text(sizes),
        _vl(sizes),
        *([] if published else [_head(sizes)]),
        _loop(sizes, published),
    ]


@dataclass(frozen=True, slots=True)
class _Sizes:
    config: GrootConfig
    work: Workload
    itemsize: int

    @property
    def patches(self) -> int:
        """Patches of one image."""
        vision, _ = self.config.backbone
        return (IMAGE_SIDE // vision.patch_size) ** 2

    @property
    def image_tokens(self) -> int:
        """Image tokens of one row."""
        return self.work.cameras * self.patches // self.config.merge

    @property
    def tokens(self) -> int:
        """Tokens of one row."""
        return self.image_tokens + self.work.tokens

    def keys(self) -> dict[str, tuple[int, int]]:
        """Return group of cross-attending blocks -> how many blocks, and keys of one row."""
        even = range(0, self.config.diffusion_model_cfg.num_layers, 2)
        if not self.config.use_alternate_vl_dit:
            return {"all": (len(even), self.tokens)}
        every = 2 * self.config.attend_text_every_n_blocks
        text = sum(1 for i in even if i % every == 0)
        return {
            "text": (text, self.work.tokens),
            "image": (len(even) - text, self.image_tokens),
        }


def _vision(s: _Sizes) -> StageCost:
    c, _ = s.config.backbone
    width, patches, merge = c.hidden_size, s.patches, s.config.merge
    layer = 4 * width**2 + 2 * width * c.intermediate_size
    joined = merge * width
    merger = joined**2 + joined * c.out_hidden_size
    mergers = (1 + len(c.deepstack_visual_indexes)) * merger
    per_image = 2 * patches * (s.config.patch_values * width + c.depth * layer)
    per_image += 2 * (patches // merge) * mergers + c.depth * 4 * patches**2 * width
    images = s.work.rows * s.work.cameras
    weights = c.depth * layer + mergers + s.config.patch_values * width
    return StageCost(
        "vision",
        "encode/vision",
        images * per_image,
        s.itemsize * weights if images else 0,
        images * patches * (FLOAT32 * s.config.patch_values + s.itemsize * width),
        "patches, tower, merger and deepstack mergers",
    )


def _text(s: _Sizes) -> StageCost:
    _, c = s.config.backbone
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * q + 2 * kv) + 3 * c.hidden_size * c.intermediate_size
    layers, tokens = s.config.select_layer, s.tokens
    # Causal: half of the scores, as published accounts have it in full.
    per_row = layers * (2 * tokens * layer + 4 * tokens**2 * q)
    return StageCost(
        "text",
        "encode/text",
        s.work.rows * per_row,
        s.itemsize * layers * layer,
        s.work.rows * tokens * s.itemsize * (c.hidden_size + layers * 2 * kv),
        f"{layers} layers",
    )


def _vl(s: _Sizes) -> StageCost:
    vl, tokens = s.config.vl_self_attention_cfg, s.tokens
    layers, width = (0, 0) if vl is None else (vl.num_layers, vl.width)
    weights = layers * 12 * width**2
    per_row = 2 * tokens * weights + layers * 4 * tokens**2 * width
    return StageCost(
        "vl",
        "encode/vl",
        s.work.rows * per_row,
        s.itemsize * weights,
        s.work.rows * tokens * s.itemsize * s.config.backbone_embedding_dim,
        "self-attention over the backbone's tokens",
    )


def _cross_weights(s: _Sizes) -> int:
    """Key and value weights of one cross-attending block."""
    return 2 * s.config.backbone_embedding_dim * s.config.diffusion_model_cfg.width


def _head(s: _Sizes) -> StageCost:
    """What is done once per request for the steps: keys, values and the state token."""
    c = s.config
    keys = s.keys().values()
    state = c.state_width * c.hidden_size + c.hidden_size * c.input_embedding_dim
    per_row = 2 * state + 2 * sum(count * seen for count, seen in keys) * _cross_weights(s)
    weights = sum(count for count, _ in keys) * _cross_weights(s)
    bank = _bank_weights(c)
    kept = 2 * c.diffusion_model_cfg.width * sum(count * seen for count, seen in keys)
    return StageCost(
        "head",
        "encode/head",
        s.work.rows * per_row,
        s.itemsize * (weights + s.work.rows * (state + bank)),
        s.work.rows * s.itemsize * (kept + bank),
        "keys and values of the backbone's tokens, state token, weights of the embodiment",
    )


def _bank_weights(c: GrootConfig) -> int:
    """Weights of one embodiment that every step reads."""
    width, hidden = c.input_embedding_dim, c.hidden_size
    encoder = c.max_action_dim * width + 2 * width**2
    return encoder + hidden**2 + hidden * c.max_action_dim


def _loop(s: _Sizes, published: bool) -> StageCost:
    c, dit, steps, rows = s.config, s.config.diffusion_model_cfg, s.work.steps, s.work.rows
    width, tokens = dit.width, 1 + c.action_horizon
    even = sum(count for count, _ in s.keys().values())
    odd = dit.num_layers - even
    query = even * 2 * width**2 + odd * 4 * width**2 + dit.num_layers * 8 * width**2
    decoded = tokens if published else c.action_horizon
    out = width * dit.output_dim
    per_row = 2 * (tokens * query + decoded * out + c.action_horizon * _bank_weights(c))
    per_row += odd * 4 * tokens**2 * width
    per_row += sum(count * 4 * tokens * seen * width for count, seen in s.keys().values())
    weights = query + out + rows * _bank_weights(c)
    other = 2 * width * sum(count * seen for count, seen in s.keys().values()) * s.itemsize
    tables = FLOAT32 * width * (2 * dit.num_layers + 2)
    if published:
        time = TIME_CHANNELS * width + width**2 + 2 * (dit.num_layers + 1) * width**2
        crossed = sum(count * seen for count, seen in s.keys().values()) * _cross_weights(s)
        per_row += 2 * (time + crossed) + 2 * c.action_horizon * c.input_embedding_dim**2
        weights += time + even * _cross_weights(s)
        tables = 0
    return StageCost(
        "loop",
        "solve",
        steps * rows * per_row,
        steps * s.itemsize * weights,
        steps * (rows * other + tables),
        "keys, values and modulations at every step" if published else "tables over steps",
    )
