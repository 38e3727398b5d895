"""Arguments of plugin ``minicpm_robot``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phyai.adapter import AdapterArgs
from phyai.errors import ConfigError
from phyai.models.minicpm.precision import dtype_named
from phyai.models.minicpm_robot.config import LIMITS, MiniCPMRobotConfig

MAX_TEXT_TOKENS = 8192
# Accepted for the scripts of earlier versions; which kernel runs is the kernel policy's choice.
GDN_BACKENDS = ("auto", "fla")
NORM_BACKENDS = ("auto", "phyai-kernel")


@dataclass
class MiniCPMRobotArgs(AdapterArgs):
    """Arguments of MiniCPM-RobotManip.

    checkpoint_dir: folder or hub id (``org/name[@revision]``) of the weights; None = random
        weights at the config's sizes.  checkpoint: another name of it.
    config: overrides the checkpoint's own.
    contract: robot layout of rows that do not name theirs in option ``contract``: ``raw`` (all
        channels as they are), ``libero``, ``calvin`` or ``robotwin``; None = raw.
    embodiment_id: weight bank of rows that do not name theirs in option ``embodiment_id``; None =
        the contract's, else 0. A shared head ignores it.
    precision: of the vision-language model, fp32 or bf16; None = the engine's params_dtype. Norm
        statistics, decays, the recurrent states, rotary angles, softmax, the tables over steps
        and the solver variable are float32 in both.
    action_params_dtype: of the action head, torch.float32 or torch.bfloat16 or their names; None =
        float32 in every precision, as released.
    tokenizer: folder or file of the tokenizer; None = the checkpoint's.
    num_steps: solver steps of requests that name none; None = the checkpoint's.
    max_text_tokens: most tokens of a row without its image tokens.
    embedding_in_file: leave the token embedding in the memory-mapped checkpoint: less memory.
    control_hz: commands per second; None = the contract's.
    gdn_backend, norm_backend: accepted for older scripts, see GDN_BACKENDS and NORM_BACKENDS.
    processor_dir: where tokenizer, chat template and image settings are, when not in the
        checkpoint.
    seed: of random weights.

    >>> from phyai.models.minicpm_robot import MiniCPMRobotArgs
    >>> args = MiniCPMRobotArgs(checkpoint="org/name", precision="bf16", contract="libero")
    >>> args.checkpoint_dir, args.checkpoint
    ('org/name', None)
    """

    checkpoint_dir: str | Path | None = None
    config: MiniCPMRobotConfig | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | dict[str, str] | None = None
    weight_strict: bool = True
    revision: str | None = None
    precision: str | None = None
    action_params_dtype: torch.dtype | str | None = None
    contract: str | None = None
    embodiment_id: int | None = None
    tokenizer: str | Path | None = None
    processor_dir: str | Path | None = None
    num_steps: int | None = None
    max_text_tokens: int = 512
    embedding_in_file: bool = False
    control_hz: float | None = None
    gdn_backend: str = "auto"
    norm_backend: str = "auto"
    seed: int = 0
    checkpoint: str | Path | None = None

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            if self.checkpoint_dir not in (None, self.checkpoint):
                raise ConfigError(
                    "checkpoint is another name of checkpoint_dir, so one is enough; got "
                    f"{str(self.checkpoint)!r} and {str(self.checkpoint_dir)!r}. Drop one."
                )
            # Moved, so that dataclasses.replace of one name does not meet the other.
            self.checkpoint_dir, self.checkpoint = self.checkpoint, None
        self._check_integer("max_batch_size", 1, None)
        self._check_integer("max_text_tokens", 1, MAX_TEXT_TOKENS)
        if self.embodiment_id is not None:
            self._check_integer("embodiment_id", 0, None)
        if self.num_steps is not None:
            self._check_integer("num_steps", 1, LIMITS["num_inference_timesteps"])
        if not isinstance(self.embedding_in_file, bool):
            raise ConfigError(
                "MiniCPMRobotArgs.embedding_in_file must be True or False; got "
                f"{self.embedding_in_file!r}."
            )
        if self.control_hz is not None:
            self._check_positive("control_hz", self.control_hz)
        for name, known in (("gdn_backend", GDN_BACKENDS), ("norm_backend", NORM_BACKENDS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"MiniCPMRobotArgs.{name} must be one of {', '.join(known)}; got "
                    f"{getattr(self, name)!r}. Choose kernels with a kernel policy."
                )
        self.head_dtype()

    def head_dtype(self) -> torch.dtype:
        """Return the dtype of the action head.  Raises: ConfigError."""
        value = self.action_params_dtype
        name = "fp32" if value is None else str(value).removeprefix("torch.")
        dtype = dtype_named(name)
        if dtype is None:
            raise ConfigError(
                f"MiniCPMRobotArgs.action_params_dtype must be float32 or bfloat16; got {value!r}."
            )
        return dtype

    def _check_integer(self, name: str, least: int, most: int | None) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"MiniCPMRobotArgs.{name} must be an int; got {value!r}.")
        if value < least or (most is not None and value > most):
            limits = f"at least {least}" if most is None else f"in [{least}, {most}]"
            raise ConfigError(f"MiniCPMRobotArgs.{name} must be {limits}; got {value}.")

    def _check_positive(self, name: str, value: Any) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ConfigError(
                f"MiniCPMRobotArgs.{name} must be a finite number > 0; got {value!r}."
            )
