"""Arguments of plugin ``minicpm_robot_track``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phyai.adapter import AdapterArgs
from phyai.errors import ConfigError
from phyai.models.minicpm_robot_track.config import LIMITS, MiniCPMRobotTrackConfig


@dataclass
class MiniCPMRobotTrackArgs(AdapterArgs):
    """Arguments of MiniCPM-RobotTrack.

    checkpoint_dir: folder or hub id (``org/name[@revision]``), or one safetensors file together
        with ``config``; None = random weights at the config's sizes.
    config: overrides the checkpoint's own.
    dino_dir, siglip_dir: folders or hub ids of DINOv3 ViT-S/16 and SigLIP-384, both or neither;
        without them requests must bring their vision features.
    tokenizer: folder or file with tokenizer.json; None = in the checkpoint.
    precision: fp32 or bf16; None = the engine's params_dtype. Vision projector, markers and
        trajectory head are float32 in both.
    max_text_tokens: most tokens of an instruction; None = the checkpoint's (128). Every session
        keeps room for that many.
    velocity_limits: (m/s, rad/s) the base velocity in ``ActionChunk.info`` is clipped to; the
        robot's usual ones are (0.15, 0.30). None = as the waypoint says. Waypoints are never
        changed.
    towers_random: build the released vision towers with random weights (with checkpoint_dir None).
    seed: of random weights.

    >>> from phyai.models.minicpm_robot_track import MiniCPMRobotTrackArgs
    >>> args = MiniCPMRobotTrackArgs(checkpoint_dir="org/name", velocity_limits=(0.15, 0.3))
    >>> args.precision is None
    True
    """

    checkpoint_dir: str | Path | None = None
    config: MiniCPMRobotTrackConfig | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | dict[str, str] | None = None
    weight_strict: bool = True
    revision: str | None = None
    precision: str | None = None
    dino_dir: str | Path | None = None
    siglip_dir: str | Path | None = None
    tokenizer: str | Path | None = None
    max_text_tokens: int | None = None
    velocity_limits: tuple[float, float] | None = None
    towers_random: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_integer("max_batch_size", None)
        if self.max_text_tokens is not None:
            self._check_integer("max_text_tokens", LIMITS["max_text_tokens"])
        if (self.dino_dir is None) != (self.siglip_dir is None):
            raise ConfigError(
                "MiniCPMRobotTrackArgs.dino_dir and siglip_dir must be given together; got "
                f"{self.dino_dir!r} and {self.siglip_dir!r}. Give both, or send features."
            )
        if self.towers_random and (self.dino_dir or self.checkpoint_dir):
            raise ConfigError(
                "MiniCPMRobotTrackArgs.towers_random must be False beside a checkpoint or tower "
                "folders; got True. Pass dino_dir and siglip_dir instead."
            )
        if self.velocity_limits is not None:
            self._check_limits(self.velocity_limits)

    def _check_integer(self, name: str, most: int | None) -> None:
        value = getattr(self, name)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or value < 1 or (most is not None and value > most):
            limits = "at least 1" if most is None else f"in [1, {most}]"
            raise ConfigError(
                f"MiniCPMRobotTrackArgs.{name} must be an integer, {limits}; got {value!r}. "
                "Correct it."
            )

    def _check_limits(self, limits: Any) -> None:
        fits = isinstance(limits, (tuple, list)) and len(limits) == 2
        if not fits or not all(
            isinstance(n, (int, float)) and not isinstance(n, bool) and 0 < n < math.inf
            for n in limits
        ):
            raise ConfigError(
                "MiniCPMRobotTrackArgs.velocity_limits must be two finite numbers > 0, m/s and "
                f"rad/s; got {limits!r}. Use (0.15, 0.3), or leave it out."
            )
