"""How the heads of an attention layer are shared out over the tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

from phyai.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShards:
    """The part of an attention layer's heads one rank computes.

    heads, kv_heads: on this rank.  kv_replicas: how many neighbouring ranks have the same key and
    value heads, because there are fewer of those than ranks.  total_heads, total_kv_heads: of the
    layer.

    Query heads are split evenly, in order. Key and value heads are split too when there are
    enough of them; else each is kept by all ranks whose query heads read it.

    >>> from phyai.parallel import HeadShards
    >>> shards = HeadShards.of(heads=8, kv_heads=2, tp=4, tp_rank=3)
    >>> shards.heads, shards.kv_heads, shards.kv_replicas
    (2, 1, 2)
    """

    heads: int
    kv_heads: int
    kv_replicas: int
    total_heads: int
    total_kv_heads: int
    tp: int
    tp_rank: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, tp: int, tp_rank: int) -> HeadShards:
        """Return the share of rank ``tp_rank`` of ``tp``.

        Raises: ConfigError unless tp divides heads, and kv_heads is a multiple of tp or tp of
            kv_heads; the message lists the sizes that work.
        """
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ConfigError(
                f"attention heads must be a multiple of kv_heads; got {heads} and {kv_heads}. "
                "Check the model's config."
            )
        sizes = cls.sizes(heads, kv_heads)
        if tp not in sizes:
            raise ConfigError(
                f"tp_size must divide the {heads} query heads, and the {kv_heads} key heads must "
                f"be a multiple of it or it of them; got {tp}. Sizes that work: "
                f"{', '.join(map(str, sizes))}."
            )
        if not 0 <= tp_rank < tp:
            raise ConfigError(f"tp rank must be in [0, {tp}); got {tp_rank}.")
        return cls(
            heads // tp,
            max(kv_heads // tp, 1),
            max(tp // kv_heads, 1),
            heads,
            kv_heads,
            tp,
            tp_rank,
        )

    @staticmethod
    def sizes(heads: int, kv_heads: int) -> tuple[int, ...]:
        """Return the tp sizes these heads can be shared out over."""
        return tuple(
            tp
            for tp in range(1, heads + 1)
            if heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
        )
