"""Sizes and settings of one GR00T N1.7 checkpoint, checked at construction.

Field names and defaults are those of the official ``config.json``, in which a key that equals the
class default may be absent. The class defaults are not the released model: released checkpoints
say ``select_layer`` 16, 32 DiT layers and 4 layers of VL self-attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from phyai.backbones.qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig
from phyai.errors import ConfigError

MODEL_TYPE = "Gr00tN1d7"
MODEL_NAME = "nvidia/Cosmos-Reason2-2B"
# Far above any released checkpoint: a file that asks for more is broken, or means harm.
LIMITS = {
    "max_state_dim": 4096,
    "max_action_dim": 4096,
    "action_horizon": 4096,
    "state_history_length": 64,
    "max_num_embodiments": 1024,
    "max_seq_len": 65536,
    "num_inference_timesteps": 200,
    "num_timestep_buckets": 1_000_000,
    "attend_text_every_n_blocks": 1024,
}


def check_positive(owner: object, prefix: str, *names: str) -> None:
    """Raise ConfigError unless these attributes are integers of at least 1."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"{prefix}{name} must be a positive integer; got {value!r}. Correct {name}."
            )


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """``diffusion_model_cfg``: the diffusion transformer. Defaults: the class defaults.

    Even blocks attend to the backbone's tokens, odd blocks to the state and action tokens.
    """

    num_layers: int = 16
    num_attention_heads: int = 32
    attention_head_dim: int = 48
    output_dim: int = 1024

    def __post_init__(self) -> None:
        check_positive(
            self,
            "diffusion_model_cfg.",
            "num_layers",
            "num_attention_heads",
            "attention_head_dim",
            "output_dim",
        )

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True, slots=True)
class SelfAttentionConfig:
    """``vl_self_attention_cfg``: plain transformer blocks over the backbone's tokens."""

    num_layers: int = 4
    num_attention_heads: int = 32
    attention_head_dim: int = 64

    def __post_init__(self) -> None:
        check_positive(
            self,
            "vl_self_attention_cfg.",
            "num_layers",
            "num_attention_heads",
            "attention_head_dim",
        )

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


def _released_backbone() -> tuple[Qwen3VLVisionConfig, Qwen3VLTextConfig]:
    from phyai.models.gr00t.backbone_files import RELEASED, backbone_of

    return backbone_of(RELEASED)


@dataclass(frozen=True, slots=True)
class GrootConfig:
    """Everything a GR00T N1.7 checkpoint and its backbone folder say about sizes.

    vl_self_attention_cfg: None = the features go into the diffusion transformer as they are.
    backbone: vision tower and language model of the backbone; only the first ``select_layer``
        language layers exist in the checkpoint.
    image_token_id, pad_token_id: of the backbone's tokenizer.

    >>> from phyai.models.gr00t.config import GrootConfig
    >>> config = GrootConfig.released()
    >>> config.diffusion_model_cfg.num_layers, config.select_layer, config.action_horizon
    (32, 16, 40)
    """

    backbone_embedding_dim: int = 2048
    select_layer: int = 12
    max_state_dim: int = 132
    max_action_dim: int = 132
    action_horizon: int = 40
    state_history_length: int = 1
    hidden_size: int = 1024
    input_embedding_dim: int = 1536
    max_num_embodiments: int = 32
    max_seq_len: int = 1024
    add_pos_embed: bool = True
    use_vlln: bool = True
    use_alternate_vl_dit: bool = True
    attend_text_every_n_blocks: int = 2
    diffusion_model_cfg: DiTConfig = DiTConfig()
    vl_self_attention_cfg: SelfAttentionConfig | None = None
    num_inference_timesteps: int = 4
    num_timestep_buckets: int = 1000
    model_name: str = MODEL_NAME
    backbone: tuple[Qwen3VLVisionConfig, Qwen3VLTextConfig] = field(
        default_factory=_released_backbone
    )
    image_token_id: int = 151655
    pad_token_id: int = 151643

    def __post_init__(self) -> None:
        check_positive(
            self,
            "",
            "backbone_embedding_dim",
            "select_layer",
            "hidden_size",
            "input_embedding_dim",
            *LIMITS,
        )
        for name, most in LIMITS.items():
            if getattr(self, name) > most:
                raise ConfigError(
                    f"{name} must be at most {most}; got {getattr(self, name)}. Correct {name}."
                )
        self._check_widths()
        _, text = self.backbone
        if self.select_layer > text.num_hidden_layers:
            raise ConfigError(
                f"select_layer must be at most the backbone's {text.num_hidden_layers} language "
                f"layers; got {self.select_layer}. Correct select_layer or the backbone config."
            )
        for name in ("image_token_id", "pad_token_id"):
            if not 0 <= getattr(self, name) < text.vocab_size:
                raise ConfigError(
                    f"{name} must be in the vocabulary of {text.vocab_size} tokens; got "
                    f"{getattr(self, name)}. Correct the backbone config."
                )
        if self.add_pos_embed and self.max_seq_len < self.action_horizon:
            raise ConfigError(
                "max_seq_len, the size of the position table, must be at least action_horizon = "
                f"{self.action_horizon}; got {self.max_seq_len}. Correct max_seq_len."
            )

    def _check_widths(self) -> None:
        dit, vl = self.diffusion_model_cfg, self.vl_self_attention_cfg
        vision, text = self.backbone
        pairs = [
            ("input_embedding_dim", self.input_embedding_dim,
             "diffusion_model_cfg heads times head dim", dit.width),
            ("hidden_size", self.hidden_size, "diffusion_model_cfg.output_dim", dit.output_dim),
            ("backbone_embedding_dim", self.backbone_embedding_dim,
             "the backbone's hidden_size", text.hidden_size),
            ("the vision tower's out_hidden_size", vision.out_hidden_size,
             "the language model's hidden_size", text.hidden_size),
        ]  # fmt: skip
        if vl is not None:
            pairs.append(
                ("backbone_embedding_dim", self.backbone_embedding_dim,
                 "vl_self_attention_cfg heads times head dim", vl.width)
            )  # fmt: skip
        for name, value, other, wanted in pairs:
            if value != wanted:
                raise ConfigError(
                    f"{name} must equal {other}; got {value} and {wanted}. Correct the config, "
                    "or pass the backbone_dir that belongs to this checkpoint."
                )
        if self.input_embedding_dim % 2:
            raise ConfigError(
                f"input_embedding_dim must be even for the time embedding; got "
                f"{self.input_embedding_dim}. Correct the config."
            )

    @property
    def state_width(self) -> int:
        """Inputs of the state encoder: all steps of the history side by side."""
        return self.max_state_dim * self.state_history_length

    @property
    def merge(self) -> int:
        """Patches that become one image token."""
        vision, _ = self.backbone
        return int(vision.spatial_merge_size) ** 2

    @property
    def patch_values(self) -> int:
        """Numbers of one patch row: channels, frames and pixels."""
        vision, _ = self.backbone
        return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)

    @classmethod
    def released(cls) -> GrootConfig:
        """Return the sizes of the released 3B checkpoints."""
        return cls(
            select_layer=16,
            diffusion_model_cfg=DiTConfig(num_layers=32),
            vl_self_attention_cfg=SelfAttentionConfig(),
        )

    @classmethod
    def from_folder(cls, folder: str | Path, backbone_dir: str | Path | None = None) -> GrootConfig:
        """Return the config of a checkpoint folder.

        backbone_dir: folder of the backbone with its ``config.json`` or ``qwen3_vl_config.json``;
            None = beside the checkpoint, else the released sizes of Cosmos-Reason2-2B.
        Raises: CheckpointError for a foreign, broken or unsupported file, and ConfigError for
        values that cannot work together.
        """
        from phyai.models.gr00t.config_files import read_config

        return read_config(Path(folder), None if backbone_dir is None else Path(backbone_dir))
