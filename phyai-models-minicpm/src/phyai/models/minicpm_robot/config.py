"""Sizes of a MiniCPM-RobotManip checkpoint. Field names are those of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phyai.errors import ConfigError

LINEAR, FULL = "linear_attention", "full_attention"
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
LIMITS = {
    "action_dim": 4096,
    "state_dim": 4096,
    "action_horizon": 4096,
    "num_inference_timesteps": 200,
    "num_timestep_buckets": 1_000_000,
    "max_num_embodiments": 1024,
    "max_seq_len": 65536,
    "num_target_vision_tokens": 4096,
}


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """The SigLIP tower, with a window merger after layer ``insert_layer_id``.

    >>> VisionSizes().positions_per_side
    70
    """

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 980
    patch_size: int = 14
    layer_norm_eps: float = 1e-6
    insert_layer_id: int = 6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def positions_per_side(self) -> int:
        """Return the side of the square position table."""
        return self.image_size // self.patch_size


@dataclass(frozen=True, slots=True)
class TextSizes:
    """The Qwen3.5 decoder: gated delta layers with a full attention layer in between.

    >>> TextSizes().layer_types.count("full_attention"), TextSizes().rotary_dim
    (6, 64)
    """

    vocab_size: int = 248094
    hidden_size: int = 1024
    intermediate_size: int = 3584
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 16
    layer_types: tuple[str, ...] = (LINEAR, LINEAR, LINEAR, FULL) * 6
    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (11, 11, 10)
    max_position_embeddings: int = 262144

    @property
    def rotary_dim(self) -> int:
        """Return how many dims of a head rotate, the first ones."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_size(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The diffusion transformer and its encoders; ``shared_head``: one bank, ids are ignored.

    hidden_size: inner width of the action decoder.  width: of the transformer.
    """

    width: int = 768
    num_layers: int = 16
    num_attention_heads: int = 12
    attention_head_dim: int = 64
    cross_attention_dim: int = 1024
    ff_dim: int = 3072
    output_dim: int = 1024
    hidden_size: int = 1024
    action_dim: int = 80
    state_dim: int = 80
    action_horizon: int = 30
    num_inference_timesteps: int = 4
    num_target_vision_tokens: int = 32
    max_seq_len: int = 1024
    num_timestep_buckets: int = 1000
    max_num_embodiments: int = 32
    shared_head: bool = False
    add_pos_embed: bool = True


@dataclass(frozen=True, slots=True)
class MiniCPMRobotConfig:
    """A whole checkpoint.

    >>> MiniCPMRobotConfig().image_tokens(32, 32)
    64
    """

    vision: VisionSizes = field(default_factory=VisionSizes)
    text: TextSizes = field(default_factory=TextSizes)
    head: HeadSizes = field(default_factory=HeadSizes)
    image_token_id: int = 248056
    image_size: int = 448
    downsample_mode: str = "16x"

    def __post_init__(self) -> None:
        if self.downsample_mode not in ("16x", "4x"):
            raise ConfigError(
                f"downsample_mode must be '16x' or '4x'; got {self.downsample_mode!r}. "
                "Correct config.json."
            )
        from phyai.models.minicpm_robot.config_checks import check_config

        check_config(self)

    @property
    def merge(self) -> int:
        """Return patches per side of one image token."""
        return 4 if self.downsample_mode == "16x" else 2

    def image_tokens(self, rows: int, columns: int) -> int:
        """Return the tokens of an image of rows x columns patches."""
        return (rows // self.merge) * (columns // self.merge)

    @property
    def patch_values(self) -> int:
        """Return the numbers of one patch: channels and pixels."""
        return self.vision.num_channels * self.vision.patch_size**2

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        remap: Callable[[str], str | None] | Mapping[str, str] | None = None,
    ) -> MiniCPMRobotConfig:
        """Return the config of a checkpoint folder: its config.json and its tensors' shapes.

        What ``action_head_cfg`` says wins over shapes, so that a contradiction fails at loading.
        remap: the caller's own renaming of stored tensors, see ``weight_remap``.
        Raises: CheckpointError for a foreign, broken or unsupported file, and ConfigError for
        values that cannot work together.
        """
        from phyai.models.minicpm_robot.config_files import read_config

        return read_config(Path(folder), remap)
