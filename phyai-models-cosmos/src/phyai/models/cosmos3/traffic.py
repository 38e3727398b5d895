"""What the ranks of a replica exchange and hold, from the sizes alone. Torch-free.

docs/parallel.md has the same formulas; the tests compare both with what ranks count.
"""

from __future__ import annotations

from dataclasses import dataclass

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.flops import TIME_FEATURES, MediaTokens

GUIDANCE_BYTES = 4
"""Of a number that the two guidance ranks exchange: always float32."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives along one axis, and the bytes that a rank hands in with all of them.

    >>> Exchange(2, 100) + 3 * Exchange(1, 10)
    Exchange(collectives=5, payload_bytes=130)
    """

    collectives: int = 0
    payload_bytes: int = 0

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(
            self.collectives + other.collectives, self.payload_bytes + other.payload_bytes
        )

    def __mul__(self, times: int) -> Exchange:
        return Exchange(self.collectives * times, self.payload_bytes * times)

    __rmul__ = __mul__


def text_exchange(config: Cosmos3Config, tokens: int, itemsize: int) -> Exchange:
    """Return what goes along tp for one text; for a remembered one it is nothing.

    The embedding, then attention and MLP of each layer but the last.

    >>> text_exchange(Cosmos3Config(), 110, 2).collectives
    71
    """
    count = 1 + 2 * (config.num_hidden_layers - 1)
    return Exchange(count, count * tokens * config.hidden_size * itemsize)


def evaluation_exchange(
    config: Cosmos3Config, media: MediaTokens, rows: int, itemsize: int
) -> Exchange:
    """Return what goes along tp for one branch of one step: attention and MLP of every layer.

    >>> evaluation_exchange(Cosmos3Config(), MediaTokens(3060, 33), 1, 2)
    Exchange(collectives=72, payload_bytes=1824325632)
    """
    count = 2 * config.num_hidden_layers
    return Exchange(count, count * rows * media.total * config.hidden_size * itemsize)


def guidance_exchange(values: int, rows: int) -> Exchange:
    """Return what goes along cfg in one step of a guided request.

    values: numbers of all leaves of one row's solver variable.
    """
    return Exchange(1, rows * values * GUIDANCE_BYTES)


def decode_exchange(
    frames: int, tile: tuple[int, int], itemsize: int, tp: int
) -> tuple[Exchange, Exchange]:
    """Return what goes along tp and along cfg for one row's video decoded in a tile per rank.

    frames: latents of the clip; each is exchanged by itself.  tile: pixels of the largest tile.
    An axis of one rank exchanges nothing, whatever is returned for it.
    """
    pixels = 1 + 4 * (frames - 1)
    own = 3 * pixels * tile[0] * tile[1] * itemsize
    return Exchange(frames, own), Exchange(frames, own * tp)


@dataclass(frozen=True, slots=True)
class RankWeights:
    """Numbers of a transformer's weights on one rank.

    split: of layers that are shared out.  whole: of what every rank holds: norms, heads, the time
    network.
    """

    split: int
    whole: int


def rank_weights(
    config: Cosmos3Config, tp: int, *, rank: int = 0, action: bool = True, sound: bool = True
) -> RankWeights:
    """Return what one rank of ``tp`` holds and reads; sizes as in ``HeadShards``.

    >>> whole, part = (rank_weights(Cosmos3Config(), tp) for tp in (1, 4))
    >>> whole.split / part.split, part.whole == whole.whole
    (4.0, True)
    """
    width, layers = config.hidden_size, config.num_hidden_layers
    kv = 2 * width * config.kv_size // min(tp, config.num_key_value_heads)
    layer = (2 * width * config.q_size + 3 * width * config.intermediate_size) // tp + kv
    rows = -(-config.vocab_size // tp)
    table = min(rows, config.vocab_size - rank * rows) * width
    split = table + layers * layer + (layers - 1) * layer + kv  # the last text layer: kv alone
    norms = 2 * width + 2 * config.head_dim
    whole = layers * norms + (layers - 1) * norms + width + config.head_dim
    whole += width  # the last norm
    whole += 2 * config.patch_values * width + width + config.patch_values
    whole += width * (TIME_FEATURES + width + 2)
    if action:
        values = config.action_dim
        whole += config.num_embodiment_domains * (2 * values * width + width + values) + width
    if sound:
        whole += 2 * config.sound_dim * width + width + config.sound_dim + width
    return RankWeights(split, whole)
