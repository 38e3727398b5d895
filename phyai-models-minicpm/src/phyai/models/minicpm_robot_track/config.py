"""Sizes and settings of one MiniCPM-RobotTrack checkpoint, checked at construction.

Field names and defaults are those of the released ``config.json``, in which a key that equals the
default may be absent; the backbone's are nested under ``backbone_config``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from phyai.errors import ConfigError

MODEL_TYPE = "minicpm_robot_track"
RELEASED_HIDDEN = (4096, 1024, 512, 256, 128)
"""Widths of the trajectory head."""
ACTION_NAMES = ("x", "y", "yaw")
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
LIMITS = {
    "vision_feature_dim": 65536,
    "coarse_tokens_per_frame": 1024,
    "fine_tokens_current_frame": 4096,
    "num_waypoints": 4096,
    "max_text_tokens": 8192,
    "max_time_steps": 1_000_000,
}
MAX_HISTORY = 4096


def check_integers(owner: object, prefix: str, *names: str, least: int = 1) -> None:
    """Raise ConfigError unless these attributes are integers of at least ``least``."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                f"{prefix}{name} must be an integer of at least {least}; got {value!r}. "
                f"Correct {name}."
            )


@dataclass(frozen=True, slots=True)
class BackboneSizes:
    """The MiniCPM4 decoder. Defaults: the released 0.5B.

    scale_depth: every residual branch is multiplied by scale_depth / sqrt(layers).
    short_factor, long_factor: what the rotary frequencies are divided by, for sequences up to
        ``original_max_position_embeddings`` tokens and for longer ones; () = 1 everywhere.

    >>> from phyai.models.minicpm_robot_track.config import BackboneSizes
    >>> BackboneSizes().head_dim, round(BackboneSizes().residual_scale, 4)
    (64, 0.2858)
    """

    vocab_size: int = 73448
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 32768
    original_max_position_embeddings: int = 32768
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    scale_depth: float = 1.4

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim max_position_embeddings original_max_position_embeddings"
        )
        check_integers(self, "backbone_config.", *sizes.split())
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                "backbone_config.num_attention_heads must be a multiple of num_key_value_heads; "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}. Correct them."
            )
        if self.short_factor and self.original_max_position_embeddings < 2:
            raise ConfigError(
                "backbone_config rope original_max_position_embeddings must be at least 2; got "
                f"{self.original_max_position_embeddings}. Correct rope_scaling."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"backbone_config.head_dim must be even to rotate; got {self.head_dim}. Correct it."
            )
        for name in ("rms_norm_eps", "rope_theta", "scale_depth"):
            _check_positive(f"backbone_config.{name}", getattr(self, name))
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors and len(factors) != self.head_dim // 2:
                raise ConfigError(
                    f"backbone_config rope {name} must hold one number per frequency, "
                    f"{self.head_dim // 2}; got {len(factors)}. Correct rope_scaling."
                )
            for factor in factors:
                _check_positive(f"backbone_config rope {name}", factor)

    @property
    def residual_scale(self) -> float:
        """What every residual branch is multiplied by."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def attention_scaling(self) -> float:
        """What cos and sin are multiplied by; 1 unless positions were extended."""
        ratio = self.max_position_embeddings / self.original_max_position_embeddings
        if ratio <= 1.0 or not self.short_factor:
            return 1.0
        return math.sqrt(1.0 + math.log(ratio) / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True, slots=True)
class MiniCPMRobotTrackConfig:
    """A whole checkpoint.

    trajectory_hidden_dims: widths of the trajectory head between its input and its output.

    >>> from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
    >>> config = MiniCPMRobotTrackConfig()
    >>> config.window_tokens, config.output_scale
    (221, (2.0, 2.0, 1.0))
    """

    vision_feature_dim: int = 1536
    history_frames: int = 31
    coarse_tokens_per_frame: int = 4
    fine_tokens_current_frame: int = 64
    num_waypoints: int = 8
    action_dim: int = 3
    max_text_tokens: int = 128
    max_time_steps: int = 4096
    xy_scale: float = 2.0
    use_tanh_actions: bool = True
    trajectory_hidden_dims: tuple[int, ...] = RELEASED_HIDDEN
    backbone: BackboneSizes = field(default_factory=BackboneSizes)

    def __post_init__(self) -> None:
        check_integers(self, "", *LIMITS, "action_dim")
        check_integers(self, "", "history_frames", least=0)
        for name, most in {**LIMITS, "history_frames": MAX_HISTORY}.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name} must be at most {most}; got {getattr(self, name)}. Correct {name}."
                )
        for name in ("coarse_tokens_per_frame", "fine_tokens_current_frame"):
            count = getattr(self, name)
            if math.isqrt(count) ** 2 != count:
                raise ConfigError(
                    f"{name} must be a square number, for a square grid; got {count}. Correct it."
                )
        if self.num_waypoints < 2:
            raise ConfigError(
                f"num_waypoints must be at least 2; got {self.num_waypoints}. Correct it."
            )
        if self.action_dim != len(ACTION_NAMES):
            raise ConfigError(
                f"action_dim must be {len(ACTION_NAMES)} (x, y, yaw); got {self.action_dim}. "
                "Correct it."
            )
        if self.max_time_steps <= self.history_frames:
            raise ConfigError(
                "max_time_steps, the rows of the time table, must be above history_frames = "
                f"{self.history_frames}; got {self.max_time_steps}. Correct it."
            )
        _check_positive("xy_scale", self.xy_scale)
        if not isinstance(self.use_tanh_actions, bool):
            raise ConfigError(
                f"use_tanh_actions must be true or false; got {self.use_tanh_actions!r}. "
                "Correct it."
            )
        hidden = self.trajectory_hidden_dims
        if not hidden or any(
            isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in hidden
        ):
            raise ConfigError(
                f"trajectory_hidden_dims must be a list of positive integers; got {hidden!r}. "
                "Correct it."
            )

    @property
    def history_tokens(self) -> int:
        """Tokens of the history, its markers included."""
        return self.history_frames * (self.coarse_tokens_per_frame + 1)

    @property
    def window_tokens(self) -> int:
        """Tokens behind the text: history, current frame, control query."""
        return self.history_tokens + self.fine_tokens_current_frame + 2

    @property
    def kept_frames(self) -> int:
        """Frames of a request that can matter; older ones are out of the window."""
        return max(self.history_frames, 1)

    @property
    def output_scale(self) -> tuple[float, float, float]:
        """Metres, metres and radians of an output of 1."""
        return (self.xy_scale, self.xy_scale, 1.0)

    @classmethod
    def released(cls) -> MiniCPMRobotTrackConfig:
        """Return the released sizes; the rotary factors are the checkpoint's alone, so 1 here."""
        return cls()

    @classmethod
    def from_file(cls, path: str | Path) -> MiniCPMRobotTrackConfig:
        """Return the config in a JSON file of the released form.

        Raises: CheckpointNotFound, CheckpointError for a foreign or unsupported file; ConfigError
            for values that cannot work together.
        """
        from phyai.models.minicpm_robot_track.config_file import read_config

        return read_config(Path(path))

    @classmethod
    def from_folder(cls, folder: str | Path) -> MiniCPMRobotTrackConfig:
        """Return the config of a checkpoint folder; see ``from_file``."""
        return cls.from_file(Path(folder) / "config.json")


def _check_positive(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise ConfigError(f"{name} must be a finite number > 0; got {value!r}. Correct it.")
