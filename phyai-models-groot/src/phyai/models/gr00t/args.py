"""Arguments of plugin ``gr00t_n17``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phyai.adapter import AdapterArgs
from phyai.errors import ConfigError, did_you_mean
from phyai.models.gr00t.config import GrootConfig

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIASES = {"float32": "fp32", "bfloat16": "bf16"}
MAX_TEXT_TOKENS = 8192


@dataclass
class GrootArgs(AdapterArgs):
    """Arguments of GR00T N1.7.

    checkpoint_dir: folder or hub id (``org/name[@revision]``) of the GR00T weights; None = random
        weights at the config's sizes.  config: overrides the checkpoint's own.
    backbone_dir: folder with the backbone's config, tokenizer and image-processor settings (not
        its weights); None = beside the checkpoint, else the released sizes.
    embodiment: tag of rows that do not name theirs in option ``embodiment``; None = the only one
        the checkpoint has.
    precision: fp32 or bf16; None = the engine's params_dtype.
    official_padding: reproduce the official batch behaviour, in which the padding of shorter
        prompts is seen by the VL self-attention, so that rows depend on the longest prompt of
        their request. Off: every row equals its result alone.
    rtc_ramp_rate: how fast a new chunk may leave the previous one behind its frozen steps.
    max_text_tokens: most tokens of a row without its image tokens.
    processor_dir: where processor_config.json and its companions are, when not in the checkpoint.
    formalize_language, letter_box_transform: override the checkpoint's processor.
    control_hz, action_units: commands per second and one unit per action; None = not known.
    seed: of random weights.

    >>> from phyai.models.gr00t import GrootArgs
    >>> GrootArgs(checkpoint_dir="org/name", precision="bf16", embodiment="libero_sim").precision
    'bf16'
    """

    checkpoint_dir: str | Path | None = None
    config: GrootConfig | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | dict[str, str] | None = None
    weight_strict: bool = True
    revision: str | None = None
    precision: str | None = None
    backbone_dir: str | Path | None = None
    embodiment: str | None = None
    official_padding: bool = False
    rtc_ramp_rate: float = 6.0
    max_text_tokens: int = 512
    processor_dir: str | Path | None = None
    formalize_language: bool | None = None
    letter_box_transform: bool | None = None
    control_hz: float | None = None
    action_units: tuple[str, ...] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_integer("max_batch_size", 1, None)
        self._check_integer("max_text_tokens", 1, MAX_TEXT_TOKENS)
        if not isinstance(self.official_padding, bool):
            raise ConfigError(
                f"GrootArgs.official_padding must be True or False; got {self.official_padding!r}."
            )
        self._check_positive("rtc_ramp_rate", self.rtc_ramp_rate)
        if self.control_hz is not None:
            self._check_positive("control_hz", self.control_hz)

    def _check_integer(self, name: str, least: int, most: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"GrootArgs.{name} must be an int; got {value!r}.")
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"in [{least}, {most}]"
            raise ConfigError(f"GrootArgs.{name} must be {limits}; got {value}.")

    def _check_positive(self, name: str, value: Any) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ConfigError(f"GrootArgs.{name} must be a finite number > 0; got {value!r}.")


def choose_dtype(precision: str | None, engine_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of weights and activations, by name or else the engine's.

    Norm statistics, rotary angles, softmax, the tables over steps, the solver variable and the
    Euler update are float32 in both.
    Raises: ConfigError for an unknown name or a dtype there is no policy for.
    """
    if precision is not None:
        dtype = PRECISIONS.get(ALIASES.get(precision, precision))
        if dtype is None:
            known = sorted([*PRECISIONS, *ALIASES])
            raise ConfigError(
                f"precision must be one of {', '.join(known)}; got {precision!r}."
                + did_you_mean(precision, known)
            )
        return dtype
    if engine_dtype not in PRECISIONS.values():
        raise ConfigError(
            f"params_dtype must be float32 or bfloat16 for this model; got {engine_dtype}. "
            "Set config.device.params_dtype or precision."
        )
    return engine_dtype
