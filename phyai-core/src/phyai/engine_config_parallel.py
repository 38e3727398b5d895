"""ParallelConfig: the ranks inside one replica; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phyai.config_fields import Config, check_instance, check_int, check_seconds, fail
from phyai.errors import ConfigError


def _help(text: str) -> dict[str, str]:
    return {"help": text}


@dataclass(frozen=True, slots=True)
class DenseParallelConfig(Config):
    """Parallel sizes of linear layers.

    >>> from phyai.engine_config import DenseParallelConfig, ParallelConfig
    >>> ParallelConfig(dense=DenseParallelConfig(tp_size=2)).tp_size
    2
    """

    tp_size: int = field(default=1, metadata=_help("tensor parallel ranks"))

    def __post_init__(self) -> None:
        check_int(self, "tp_size", minimum=1)


@dataclass(frozen=True, slots=True)
class AttentionParallelConfig(Config):
    """Parallel sizes of attention; equal to the dense ones.

    >>> from phyai.engine_config import AttentionParallelConfig, ParallelConfig
    >>> ParallelConfig(attention=AttentionParallelConfig(tp_size=2)).tp_size
    2
    """

    tp_size: int = field(default=1, metadata=_help("tensor parallel ranks"))

    def __post_init__(self) -> None:
        check_int(self, "tp_size", minimum=1)


@dataclass(frozen=True, slots=True)
class ParallelConfig(Config):
    """Ranks inside one replica; ``dense``, ``attention`` and ``tp_size`` agree after construction.

    ``tp_size=n`` is short for both nested sizes. Replicas belong to DeploymentConfig.

    >>> from phyai.engine_config import ParallelConfig
    >>> ParallelConfig(tp_size=2, cfg_size=2).infer_replica_world_size()
    4
    """

    dense: DenseParallelConfig | None = None
    attention: AttentionParallelConfig | None = None
    cfg_size: int = field(default=1, metadata=_help("ranks that share the guidance branches"))
    pipeline_size: int = field(default=1, metadata=_help("only 1"))
    tp_size: int | None = field(default=None, metadata=_help("sets dense and attention tp_size"))
    world_size: int | None = field(
        default=None, metadata=_help("ranks of one replica; null = product of the sizes")
    )
    dp_size: int = field(default=1, metadata=_help("only 1; use deployment.replica_count"))
    ep_size: int = field(default=1, metadata=_help("only 1"))
    sp_size: int = field(default=1, metadata=_help("only 1"))
    cp_size: int = field(default=1, metadata=_help("only 1"))
    timeout_s: float = field(
        default=60.0, metadata=_help("how long a rank waits for the others of its replica")
    )

    def __post_init__(self) -> None:
        check_instance(self, "dense", DenseParallelConfig, optional=True)
        check_instance(self, "attention", AttentionParallelConfig, optional=True)
        check_int(self, "cfg_size", "pipeline_size", "dp_size", minimum=1)
        check_int(self, "ep_size", "sp_size", "cp_size", minimum=1)
        check_int(self, "tp_size", "world_size", minimum=1, optional=True)
        check_seconds(self, "timeout_s")
        if self.dp_size > 1:
            fail(
                self, "dp_size", "must be 1", " Use DeploymentConfig.replica_count for more copies."
            )
        for name in ("pipeline_size", "ep_size", "sp_size", "cp_size"):
            if getattr(self, name) > 1:
                fail(self, name, "must be 1, it is not supported", " Use tp_size or cfg_size.")
        nested = {part.tp_size for part in (self.dense, self.attention) if part is not None}
        sizes = nested | ({self.tp_size} if self.tp_size is not None else set())
        if len(sizes) > 1:
            raise ConfigError(
                "ParallelConfig.tp_size must equal dense.tp_size and attention.tp_size; got "
                f"{self.tp_size!r}, {self.dense!r}, {self.attention!r}. Give tp_size alone."
            )
        tp_size = sizes.pop() if sizes else 1
        object.__setattr__(self, "tp_size", tp_size)
        object.__setattr__(self, "dense", DenseParallelConfig(tp_size))
        object.__setattr__(self, "attention", AttentionParallelConfig(tp_size))
        if self.world_size is not None and self.world_size != self._product():
            fail(
                self,
                "world_size",
                f"must be cfg_size * tp_size * pipeline_size = {self._product()}",
                " Leave it out, or change the sizes.",
            )

    def _product(self) -> int:
        assert self.tp_size is not None
        return self.cfg_size * self.tp_size * self.pipeline_size

    def infer_replica_world_size(self) -> int:
        """Return the ranks of one replica, ``cfg_size * tp_size * pipeline_size``."""
        return self._product()

    def resolve(self, world_size: int) -> ParallelConfig:
        """Return a copy bound to a launched world; ConfigError when the sizes do not fit it."""
        return self.replace(world_size=world_size)

    def replace(self, **changes: Any) -> ParallelConfig:
        """Return a validated copy; a new ``tp_size``, dense or attention size sets all three."""
        if changes.keys() & {"tp_size", "dense", "attention"}:
            changes = {"tp_size": None, "dense": None, "attention": None} | changes
        return Config.replace(self, **changes)
