"""Arguments of plugins ``cosmos3`` and ``cosmos3_policy``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phyai.adapter import AdapterArgs
from phyai.errors import ConfigError, RequestError, did_you_mean
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.processing.canvas import TIERS
from phyai.models.cosmos3.processing.checks import check_fps
from phyai.models.cosmos3.processing.domains import domain_of
from phyai.models.cosmos3.processing.generation import MAX_FRAMES, MAX_SIDE
from phyai.models.cosmos3.robots import robot_settings
from phyai.models.cosmos3.scheduler_files import SCHEDULES, check_shift

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRECISION_ALIASES = {"float32": "fp32", "bfloat16": "bf16"}
PROMPT_FORMATS = ("plain", "json")
MAX_TEXT_TOKENS = 32768
MAX_HISTORY = 64
MAX_DOMAINS = 1 << 20


@dataclass
class CheckpointArgs(AdapterArgs):
    """What both plugins say about a checkpoint and how it is loaded.

    checkpoint_dir: folder or hub id (``org/name[@revision]``) in the released layout; None = random
        weights at the config's sizes, for model requests with token ids and latents alone.
    config: overrides ``transformer/config.json``.
    max_batch_size: most rows of a request.
    weight_strict: whether a tensor that nothing reads is an error; an absent one always is.
    precision: fp32 or bf16; None = the engine's params_dtype.  vae_precision: of the video encoder
        alone; None = fp32, since rounding there shifts whole trajectories.
    flow_shift: of model requests that name none. Observations have their robot's or mode's.
    use_karras_sigmas: of model requests that name no schedule: True, False = the native schedule,
        None = as the checkpoint's scheduler file says.
    schedule: native, diffusers_flow or karras; wins over use_karras_sigmas.
    torch_compile, compile_kwargs: accepted for old configurations; graphs are chosen by the
        engine's runtime settings.
    max_text_tokens: most tokens of a prompt.  seed: of random weights.
    text_step: with graphs texts are padded to a multiple of it, so that prompts of similar lengths
        share a graph; 1: a graph, and no padding, for every length.
    vae_rank_tiles: with several ranks each decodes a part of large frames; False: all of them.
    record_all: also load and compute the part of the last text layer that no result depends on, for
        recordings.
    """

    checkpoint_dir: str | Path | None = None
    config: Cosmos3Config | None = None
    max_batch_size: int = 1
    weight_remap: Callable[[str], str | None] | dict[str, str] | None = None
    weight_strict: bool = False
    revision: str | None = None
    precision: str | None = None
    vae_precision: str | None = None
    flow_shift: float = 10.0
    use_karras_sigmas: bool | None = False
    schedule: str | None = None
    torch_compile: bool = False
    compile_kwargs: Mapping[str, Any] | None = None
    max_text_tokens: int = 4096
    text_step: int = 16
    num_steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    vae_rank_tiles: bool = True
    record_all: bool = False

    def __post_init__(self) -> None:
        self.check_integer("max_batch_size", 1, 4096)
        self.check_integer("max_text_tokens", 1, MAX_TEXT_TOKENS)
        self.check_integer("text_step", 1, 1024)
        if self.num_steps is not None:
            self.check_integer("num_steps", 1, 1000)
        self.flow_shift = check_shift(self.flow_shift)
        if self.use_karras_sigmas not in (True, False, None):
            raise ConfigError(
                f"use_karras_sigmas must be true, false or null; got {self.use_karras_sigmas!r}. "
                "Give one of them."
            )
        self.check_choice("schedule", SCHEDULES, optional=True)
        for name in ("precision", "vae_precision"):
            self.check_choice(name, (*PRECISIONS, *PRECISION_ALIASES), optional=True)

    def check_integer(self, name: str, least: int, most: int) -> None:
        """Raise ConfigError unless a field is an integer in [least, most]."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"{name} must be an integer in [{least}, {most}]; got {value!r}. Give one of these."
            )

    def check_choice(self, name: str, choices: Any, *, optional: bool = False) -> None:
        """Raise ConfigError unless a field is one of a few words."""
        value = getattr(self, name)
        if value not in choices and not (optional and value is None):
            raise ConfigError(
                f"{name} must be one of {', '.join(choices)}; got {value!r}."
                f"{did_you_mean(str(value), choices)} Pick one of them."
            )


@dataclass
class Cosmos3Args(CheckpointArgs):
    """Arguments of world generation, plugin ``cosmos3``.

    load_sound: whether the sound decoder is loaded; None = where the checkpoint has one.
    system_prompt: whether prompts are put behind the system turn; None = as the checkpoint says.
    num_frames, height, width: of prompts that name none; None = the mode's.
    vae_tile: side in pixels of the tiles a video is decoded in; 0 = whole frames, or a part per
        rank.  vae_tile_stride: distance of tiles; 0 = three quarters of one.

    >>> from phyai.models.cosmos3 import Cosmos3Args
    >>> Cosmos3Args(checkpoint_dir="org/name", precision="bf16").flow_shift
    10.0
    """

    load_sound: bool | None = None
    system_prompt: bool | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    vae_tile: int = 0
    vae_tile_stride: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("load_sound", "system_prompt"):
            if getattr(self, name) not in (True, False, None):
                raise ConfigError(
                    f"{name} must be true, false or null; got {getattr(self, name)!r}. "
                    "Give one of them."
                )
        for name, most in (("num_frames", MAX_FRAMES), ("height", MAX_SIDE), ("width", MAX_SIDE)):
            if getattr(self, name) is not None:
                self.check_integer(name, 1, most)
        if (self.height is None) != (self.width is None):
            raise ConfigError(
                f"height and width must be given together; got {self.height!r} and "
                f"{self.width!r}. Give both."
            )
        self.check_integer("vae_tile", 0, 8192)
        self.check_integer("vae_tile_stride", 0, 8192)


@dataclass
class Cosmos3PolicyArgs(CheckpointArgs):
    """Arguments of the policy, plugin ``cosmos3_policy``.

    robot: whose observations it takes; the settings are in the plugin's manifest. The fields below
        override them: chunk_size, resolution (tier of the canvas), prompt_format (plain or json),
        num_steps, guidance_scale, fps, domain (name or id of the embodiment) and robot_shift (of
        the noise schedule; flow_shift is that of model requests).
    history_length: clean action rows before the actions, the present state being the last.
    resize_image: False keeps the composed image as large as it is.
    decode_video: also decode the predicted video; off, the decoder is not even loaded.
    load_sound: also load the network's sound head, for model requests with sound_frames.
    policy_modeling_mode: accepted for old configurations: None or ``"policy"``.

    >>> from phyai.models.cosmos3 import Cosmos3PolicyArgs
    >>> Cosmos3PolicyArgs(checkpoint_dir="org/name").robot
    'droid'
    """

    use_karras_sigmas: bool | None = None
    robot: str = "droid"
    chunk_size: int | None = None
    resolution: str | None = None
    prompt_format: str | None = None
    fps: float | None = None
    domain: str | int | None = None
    robot_shift: float | None = None
    history_length: int = 1
    resize_image: bool = True
    decode_video: bool = False
    load_sound: bool = False
    policy_modeling_mode: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        robot_settings(self.robot)
        if self.chunk_size is not None:
            self.check_integer("chunk_size", 1, 4096)
        self.check_integer("history_length", 0, MAX_HISTORY)
        if isinstance(self.resolution, int) and not isinstance(self.resolution, bool):
            self.resolution = str(self.resolution)
        self.check_choice("resolution", tuple(TIERS), optional=True)
        self.check_choice("prompt_format", PROMPT_FORMATS, optional=True)
        self.check_choice("policy_modeling_mode", ("policy",), optional=True)
        if self.fps is not None:
            self.fps = configured(check_fps, self.fps)
        if self.domain is not None:
            configured(lambda name: domain_of(name, MAX_DOMAINS, 1), self.domain)
        if self.robot_shift is not None:
            self.robot_shift = check_shift(self.robot_shift)
        for name in ("resize_image", "decode_video", "load_sound"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name} must be true or false; got {getattr(self, name)!r}. Give one of them."
                )


def configured(check: Callable[[Any], Any], value: Any) -> Any:
    """Return what a check of requests returns; what it refuses is a ConfigError here."""
    try:
        return check(value)
    except RequestError as error:
        raise ConfigError(str(error)) from error


def choose_dtype(precision: str | None, engine_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of weights and activations, by name or else the engine's.

    Norm statistics, rotary angles, the time embedding, softmax, the solver variable, guidance and
    the sampler are float32 in both.
    Raises: ConfigError for a dtype there is no policy for.
    """
    if precision is not None:
        return PRECISIONS[PRECISION_ALIASES.get(precision, precision)]
    if engine_dtype not in PRECISIONS.values():
        raise ConfigError(
            f"params_dtype must be float32 or bfloat16 for this model; got {engine_dtype}. "
            "Set config.device.params_dtype or precision."
        )
    return engine_dtype
