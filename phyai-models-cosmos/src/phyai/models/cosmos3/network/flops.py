"""Operations and weights of the transformer's passes, from the sizes alone. Torch-free.

A multiply-add counts as two; matrix products and attention only, causal attention in full. What
this runtime runs: keys and values alone in the last text layer, no time network (its results are
tables), no output head.
"""

from __future__ import annotations

from dataclasses import dataclass

from phyai.models.cosmos3.config import Cosmos3Config

TIME_FEATURES = 256


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Media tokens of one row.

    >>> MediaTokens(video=3060, action=33).total
    3093
    """

    video: int
    action: int = 0
    sound: int = 0

    @property
    def total(self) -> int:
        return self.video + self.action + self.sound


def layer_weights(config: Cosmos3Config) -> int:
    """Return the weights of one expert's half of a layer."""
    attention = config.hidden_size * 2 * (config.q_size + config.kv_size)
    return attention + 3 * config.hidden_size * config.intermediate_size


def text_weights(config: Cosmos3Config, *, full_last: bool = False) -> int:
    """Return the weights a pass of the text expert reads; full_last: with the whole last layer."""
    full = config.num_hidden_layers - (0 if full_last else 1)
    kv = 0 if full_last else config.hidden_size * 2 * config.kv_size
    return full * layer_weights(config) + kv


def text_flops(config: Cosmos3Config, tokens: int, *, full_last: bool = False) -> int:
    """Return the operations of the text expert for one text; once per text, not per step."""
    full = config.num_hidden_layers - (0 if full_last else 1)
    products = 2 * tokens * text_weights(config, full_last=full_last)
    return products + full * attention_flops(config, tokens, tokens)


def evaluation_weights(config: Cosmos3Config, media: MediaTokens) -> int:
    """Return the weights one evaluation reads for one row: all layers, heads of the leaves used."""
    return config.num_hidden_layers * layer_weights(config) + sum(
        weights for weights, tokens in _heads(config, media) if tokens
    )


def evaluation_flops(config: Cosmos3Config, media: MediaTokens, text: int) -> int:
    """Return the operations of one evaluation of the media expert for one row.

    text: tokens of the branch's text, whose keys and values are there.
    """
    products = media.total * config.num_hidden_layers * layer_weights(config)
    products += sum(weights * tokens for weights, tokens in _heads(config, media))
    keys = text + media.total
    return 2 * products + config.num_hidden_layers * attention_flops(config, media.total, keys)


def attention_flops(config: Cosmos3Config, queries: int, keys: int) -> int:
    """Return the operations of scores and weighted values of one layer."""
    return 4 * queries * keys * config.q_size


def kv_values(config: Cosmos3Config, text: int) -> int:
    """Return the numbers of the text's keys and values that every evaluation reads."""
    return 2 * text * config.num_hidden_layers * config.kv_size


def time_table_flops(config: Cosmos3Config, steps: int) -> int:
    """Return the operations of one grid's table of time embeddings."""
    return 2 * steps * config.hidden_size * (TIME_FEATURES + config.hidden_size)


def _heads(config: Cosmos3Config, media: MediaTokens) -> list[tuple[int, int]]:
    """Weights of each leaf's two heads, and the tokens that pass through them."""
    sizes = (
        (config.patch_values, media.video),
        (config.action_dim, media.action),
        (config.sound_dim, media.sound),
    )
    return [(2 * values * config.hidden_size, tokens) for values, tokens in sizes]
