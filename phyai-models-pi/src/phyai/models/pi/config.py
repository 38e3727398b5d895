"""Sizes and settings of one pi0 or pi0.5 checkpoint, checked at construction.

Frozen and torch-free. ``PiConfig.from_folder`` reads a LeRobot or an openpi ``config.json``
(see ``config_files``); ``PiConfig.default`` gives the released sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from phyai.errors import ConfigError

Model = Literal["pi0", "pi05"]
Family = Literal["lerobot", "openpi"]
RTCMode = Literal["guided", "trained"]

MODELS: tuple[Model, ...] = ("pi0", "pi05")
FAMILIES: tuple[Family, ...] = ("lerobot", "openpi")
DTYPES = ("bfloat16", "float32")
RTC_SCHEDULES = ("EXP", "LINEAR", "ONES", "ZEROS")
RTC_MODES = ("guided", "trained")
NORMALIZATION_MODES = ("IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILE10", "QUANTILES")
FEATURE_TYPES = ("ACTION", "STATE", "VISUAL")

IMAGE_PREFIX = "observation.images."
BASE_CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
TOKENIZER_MAX_LENGTH: Mapping[str, int] = MappingProxyType({"pi0": 48, "pi05": 200})
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
MAX_CAMERAS = 64
LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "chunk_size": 4096,
        "max_state_dim": 4096,
        "max_action_dim": 4096,
        "num_inference_steps": 200,
        "tokenizer_max_length": 8192,
    }
)
_STATE_ACTION_MODE = {"pi0": "MEAN_STD", "pi05": "QUANTILES"}


def default_normalization(model: str) -> Mapping[str, str]:
    """Return the feature type -> mode table the released checkpoints of ``model`` use."""
    mode = _STATE_ACTION_MODE[model]
    return {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}


def short_camera_name(camera: str) -> str:
    """Return the camera's name without the LeRobot feature prefix.

    >>> from phyai.models.pi.config import short_camera_name
    >>> short_camera_name("observation.images.base_0_rgb")
    'base_0_rgb'
    """
    return camera.removeprefix(IMAGE_PREFIX)


def _check_positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ConfigError(f"{name} must be positive; got {value!r}. Correct {name}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name} must be one of {', '.join(sorted(choices))}; got {value!r}. Correct {name}."
        )


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """Sizes of the vision tower; field names as in HF sub-configs. Defaults: So400m/14 @224."""

    hidden_size: int = 1152
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    intermediate_size: int = 4304
    patch_size: int = 14
    image_size: int = 224
    num_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_positive(
            self,
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "patch_size",
            "image_size",
            "num_channels",
            "layer_norm_eps",
        )
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                "vision hidden_size must be a multiple of num_attention_heads; got "
                f"{self.hidden_size} and {self.num_attention_heads}. Correct vision_config."
            )
        if self.image_size % self.patch_size:
            raise ConfigError(
                "vision image_size must be a multiple of patch_size; got "
                f"{self.image_size} and {self.patch_size}. Correct vision_config."
            )

    @property
    def num_patches(self) -> int:
        """Tokens one camera contributes to the prefix."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    """Sizes of one decoder stack; field names as in HF sub-configs. Defaults: the 2B trunk."""

    hidden_size: int = 2048
    num_hidden_layers: int = 18
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    intermediate_size: int = 16384
    vocab_size: int = 257152
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _check_positive(
            self,
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "rms_norm_eps",
            "rope_theta",
        )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "num_attention_heads must be a multiple of num_key_value_heads; got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}. Correct the config."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim must be even for rotary embeddings; got {self.head_dim}. "
                "Correct the config."
            )


GEMMA_2B = GemmaConfig()
GEMMA_300M = GemmaConfig(hidden_size=1024, intermediate_size=4096)
_DUMMY = GemmaConfig(
    hidden_size=64, num_hidden_layers=4, intermediate_size=128, num_attention_heads=8, head_dim=16
)
# LoRA twins have equal shapes: the low-rank parts are merged before the weights are used.
GEMMA_VARIANTS: Mapping[str, GemmaConfig] = MappingProxyType(
    {
        "dummy": _DUMMY,
        "gemma_2b": GEMMA_2B,
        "gemma_2b_lora": GEMMA_2B,
        "gemma_300m": GEMMA_300M,
        "gemma_300m_lora": GEMMA_300M,
    }
)


@dataclass(frozen=True, slots=True)
class RTCConfig:
    """Real-time chunking settings stored with a checkpoint."""

    enabled: bool = True
    prefix_attention_schedule: str = "LINEAR"
    max_guidance_weight: float = 10.0
    execution_horizon: int = 10
    mode: RTCMode = "guided"

    def __post_init__(self) -> None:
        _check_choice(
            "rtc_config.prefix_attention_schedule", self.prefix_attention_schedule, RTC_SCHEDULES
        )
        _check_choice("rtc_config.mode", self.mode, RTC_MODES)
        _check_positive(self, "max_guidance_weight", "execution_horizon")


def _base_camera_keys() -> tuple[str, ...]:
    return tuple(IMAGE_PREFIX + name for name in BASE_CAMERAS)


@dataclass(frozen=True, slots=True)
class PiConfig:
    """Everything a pi0 or pi0.5 checkpoint says about itself.

    cameras: full feature keys in checkpoint order, always-missing empty cameras last.
    state_dim, action_dim: robot dims from the features; None when the files do not say.
    tokenizer_max_length: 0 means the model's released length (48 or 200).
    normalization_mapping: feature type -> mode; None means the model's released modes.

    >>> from phyai.models.pi.config import PiConfig
    >>> config = PiConfig.default("pi05")
    >>> config.camera_names, config.tokenizer_max_length
    (('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb'), 200)
    """

    model: Model
    family: Family = "lerobot"
    vision: SiglipConfig = SiglipConfig()
    text: GemmaConfig = GEMMA_2B
    expert: GemmaConfig = GEMMA_300M
    chunk_size: int = 50
    n_action_steps: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    num_inference_steps: int = 10
    min_period: float = 0.004
    max_period: float = 4.0
    tokenizer_max_length: int = 0
    image_resolution: tuple[int, int] = (224, 224)
    cameras: tuple[str, ...] = field(default_factory=_base_camera_keys)
    empty_cameras: int = 0
    state_dim: int | None = None
    action_dim: int | None = None
    normalization_mapping: Mapping[str, str] | None = field(default=None, hash=False)
    use_relative_actions: bool = False
    relative_exclude_joints: tuple[str, ...] = ("gripper",)
    action_feature_names: tuple[str, ...] | None = None
    rtc: RTCConfig | None = None
    rtc_training_max_delay: int = 0
    dtype: str = "float32"
    use_peft: bool = False

    def __post_init__(self) -> None:
        _check_choice("model", self.model, MODELS)
        _check_choice("family", self.family, FAMILIES)
        _check_choice("dtype", self.dtype, DTYPES)
        if self.tokenizer_max_length == 0:
            object.__setattr__(self, "tokenizer_max_length", TOKENIZER_MAX_LENGTH[self.model])
        if self.normalization_mapping is None:
            mapping = default_normalization(self.model)
        else:
            mapping = dict(self.normalization_mapping)
        object.__setattr__(self, "normalization_mapping", mapping)
        _check_positive(
            self,
            "chunk_size",
            "n_action_steps",
            "max_state_dim",
            "max_action_dim",
            "num_inference_steps",
            "tokenizer_max_length",
            "min_period",
            "max_period",
        )
        for name, most in LIMITS.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name} must be at most {most}; got {getattr(self, name)}. Correct {name}."
                )
        self._check_relations()
        self._check_cameras()
        for kind, mode in mapping.items():
            _check_choice(f"normalization_mapping[{kind!r}]", mode, NORMALIZATION_MODES)

    def _check_relations(self) -> None:
        for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"):
            text, expert = getattr(self.text, name), getattr(self.expert, name)
            if text != expert:
                raise ConfigError(
                    f"the expert's {name} must equal the language model's; got {expert} and "
                    f"{text}. The expert attends to the language model's keys layer by layer, "
                    "so correct expert_config or text_config."
                )
        if self.n_action_steps > self.chunk_size:
            raise ConfigError(
                f"n_action_steps must not exceed chunk_size; got {self.n_action_steps} and "
                f"{self.chunk_size}. Lower n_action_steps."
            )
        if self.min_period >= self.max_period:
            raise ConfigError(
                f"min_period must be below max_period; got {self.min_period} and "
                f"{self.max_period}. Correct the config."
            )
        for name, limit in (("state_dim", "max_state_dim"), ("action_dim", "max_action_dim")):
            value, most = getattr(self, name), getattr(self, limit)
            if value is not None and not 0 < value <= most:
                raise ConfigError(
                    f"{name} must be between 1 and {limit} = {most}; got {value}. "
                    "Correct the feature shapes."
                )
        size = self.vision.image_size
        if self.image_resolution != (size, size):
            raise ConfigError(
                f"image_resolution must equal the vision tower's {size} x {size}; got "
                f"{self.image_resolution}. Correct image_resolution or vision_config."
            )
        if not 0 <= self.rtc_training_max_delay < self.chunk_size:
            raise ConfigError(
                f"rtc_training_max_delay must be between 0 and chunk_size - 1 = "
                f"{self.chunk_size - 1}; got {self.rtc_training_max_delay}. Correct the config."
            )

    def _check_cameras(self) -> None:
        if not self.cameras:
            raise ConfigError("cameras must name at least one camera; got none. Name the cameras.")
        if len(self.cameras) > MAX_CAMERAS:
            raise ConfigError(
                f"cameras must be at most {MAX_CAMERAS}; got {len(self.cameras)}. Name fewer."
            )
        names = self.camera_names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ConfigError(
                f"camera names must differ; got {', '.join(repeated)} more than once. Rename one."
            )
        if not 0 <= self.empty_cameras < len(self.cameras):
            raise ConfigError(
                "empty_cameras must leave at least one real camera; got "
                f"{self.empty_cameras} of {len(self.cameras)}. Correct empty_cameras."
            )

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Short names of ``cameras``, in the same order."""
        return tuple(short_camera_name(camera) for camera in self.cameras)

    @property
    def num_cameras(self) -> int:
        return len(self.cameras)

    @property
    def num_image_tokens(self) -> int:
        """Prefix tokens of one camera."""
        return self.vision.num_patches

    @classmethod
    def default(cls, model: Model) -> PiConfig:
        """Return the sizes of the released base checkpoints: three cameras, 32 dims."""
        return cls(model=model, state_dim=32, action_dim=32)

    @classmethod
    def from_folder(cls, folder: str | Path, model: Model) -> PiConfig:
        """Return the config of a checkpoint folder: ``config.json`` and an optional ``arch.json``.

        Raises: CheckpointError for an unknown, foreign, outdated or incomplete file, and
        ConfigError for values that cannot work together.
        """
        from phyai.models.pi.config_files import read_config

        return read_config(Path(folder), model)
