"""Operations and bytes of each stage of MiniCPM-Robot, from the sizes alone. Torch-free.

Two accounts. "published": what the architecture describes - future tokens decoded, keys and values
of the prefix, the state's part and all modulations at every step. "computed": what this runtime
runs. Both count valid tokens only, a multiply-add as two, and leave norms and activations out; the
gated delta rule counts as its recurrent form.
"""

from __future__ import annotations

from dataclasses import dataclass

from phyai.cost import StageCost, Workload
from phyai.models.minicpm_robot.config import FULL, HeadSizes, MiniCPMRobotConfig

FLOAT32 = 4
TIME_CHANNELS = 256


def stage_costs(
    config: MiniCPMRobotConfig, workload: Workload, *, published: bool, itemsize: int
) -> list[StageCost]:
    """Return vision, text, head and loop, in the order they run.

    itemsize: bytes of a weight and of a cached number; tables are float32.
    """
    sizes = _Sizes(config, workload, itemsize)
    head = [] if published else [_head(sizes)]
    return [_vision(sizes), _text(sizes), *head, _loop(sizes, published)]


@dataclass(frozen=True, slots=True)
class _Sizes:
    config: MiniCPMRobotConfig
    work: Workload
    itemsize: int

    @property
    def patches(self) -> int:
        """Patches of one image."""
        return (self.config.image_size // self.config.vision.patch_size) ** 2

    @property
    def image_tokens(self) -> int:
        """Image tokens of one row."""
        return self.work.cameras * self.patches // self.config.merge**2

    @property
    def tokens(self) -> int:
        """Tokens of one row."""
        return self.image_tokens + self.work.tokens


def _vision(s: _Sizes) -> StageCost:
    config, c = s.config, s.config.vision
    width, patches = c.hidden_size, s.patches
    layer = 4 * width**2 + 2 * width * c.intermediate_size
    merged_early = config.merge == 4
    early = c.insert_layer_id + 1 if merged_early else c.num_hidden_layers
    late = c.num_hidden_layers - early
    few = patches // 4 if merged_early else patches
    wide, inner = 4 * width, 4 * c.intermediate_size
    window = wide * inner + inner * width
    per_image = 2 * patches * (config.patch_values * width + early * layer)
    per_image += early * 4 * patches**2 * width
    per_image += late * (2 * few * layer + 4 * few**2 * width)
    if merged_early:
        per_image += 2 * patches * 4 * width**2 + 4 * patches * 4 * width + 2 * few * window
    last = wide**2 + wide * config.text.hidden_size
    per_image += 2 * (few // 4) * last
    images = s.work.rows * s.work.cameras
    weights = config.patch_values * width + c.num_hidden_layers * layer + last
    weights += (4 * width**2 + window) if merged_early else 0
    return StageCost(
        "vision",
        "encode/vision",
        images * per_image,
        s.itemsize * weights if images else 0,
        images * patches * (FLOAT32 * config.patch_values + s.itemsize * width),
        "patches, tower, window merger and last merger",
    )


def _text(s: _Sizes) -> StageCost:
    c, tokens = s.config.text, s.tokens
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    mlp = 3 * c.hidden_size * c.intermediate_size
    full = c.hidden_size * (2 * q + 2 * kv) + q * c.hidden_size + mlp
    mixed = 2 * c.key_size + c.value_size
    linear = c.hidden_size * (mixed + c.value_size + 2 * c.linear_num_value_heads)
    linear += c.value_size * c.hidden_size + mlp
    # Decay, read with the key, write, read with the query: on a state of key dim x value.
    delta = 8 * c.value_size * c.linear_key_head_dim + 2 * mixed * c.linear_conv_kernel_dim
    count_full = c.layer_types.count(FULL)
    count_linear = c.num_hidden_layers - count_full
    per_row = 2 * tokens * (count_full * full + count_linear * linear)
    per_row += count_linear * tokens * delta
    # Causal: half of the scores, as published accounts have it in full.
    per_row += count_full * 4 * tokens**2 * q
    weights = count_full * full + count_linear * linear
    state = count_linear * c.value_size * c.linear_key_head_dim * FLOAT32
    cached = count_full * 2 * kv * tokens
    return StageCost(
        "text",
        "encode/text",
        s.work.rows * per_row,
        s.itemsize * weights,
        s.work.rows * (s.itemsize * (tokens * c.hidden_size + cached) + state),
        f"{count_linear} linear and {count_full} full attention layers",
    )


def _cross(c: HeadSizes) -> int:
    """Blocks that attend to the prefix."""
    return (c.num_layers + 1) // 2


def _head(s: _Sizes) -> StageCost:
    """What is done once per request for the steps: keys, values and the state's part."""
    c, tokens = s.config.head, s.tokens
    keys = _cross(c) * 2 * c.cross_attention_dim * c.width
    state = c.state_dim * c.width
    bank = _bank_weights(c)
    kept = _cross(c) * 2 * c.width * tokens
    return StageCost(
        "head",
        "encode/head",
        s.work.rows * 2 * (tokens * keys + state),
        s.itemsize * (keys + s.work.rows * (state + bank)),
        s.work.rows * s.itemsize * (kept + bank),
        "keys and values of the prefix, the state's part, weights of the embodiment",
    )


def _bank_weights(c: HeadSizes) -> int:
    """Weights of one embodiment that every step reads."""
    encoder = c.action_dim * c.width + 2 * c.width**2
    return encoder + c.output_dim * c.hidden_size + c.hidden_size * c.action_dim


def _loop(s: _Sizes, published: bool) -> StageCost:
    c, steps, rows = s.config.head, s.work.steps, s.work.rows
    width, horizon = c.width, c.action_horizon
    tokens = c.num_target_vision_tokens + horizon
    cross = _cross(c)
    own = c.num_layers - cross
    block = cross * 2 * width**2 + own * 4 * width**2 + c.num_layers * 2 * width * c.ff_dim
    decoded = tokens if published else horizon
    out = width * c.output_dim
    per_row = 2 * (tokens * block + decoded * out + horizon * _bank_weights(c))
    per_row += own * 4 * tokens**2 * width + cross * 4 * tokens * s.tokens * width
    weights = block + out + rows * _bank_weights(c)
    other = 2 * width * cross * s.tokens * s.itemsize
    tables = FLOAT32 * width * (2 * c.num_layers + 2)
    if published:
        time = TIME_CHANNELS * width + width**2 + 2 * (c.num_layers + 1) * width**2
        keys = cross * 2 * c.cross_attention_dim * width
        per_row += 2 * (time + s.tokens * keys + horizon * (c.state_dim * width + width**2))
        weights += time + keys + rows * (c.state_dim * width + width**2)
        tables = 0
    return StageCost(
        "loop",
        "solve",
        steps * rows * per_row,
        steps * s.itemsize * weights,
        steps * (rows * other + tables),
        "keys, values and modulations at every step" if published else "tables over steps",
    )
