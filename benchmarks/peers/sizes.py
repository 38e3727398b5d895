"""Sizes of one pi0.5 checkpoint, and the tensors its released layout holds; imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RELEASED_LAYERS = 18
RELEASED_VISION_LAYERS = 27

TOWER = "paligemma_with_expert.paligemma.model.vision_tower.vision_model"
PROJECTOR = "paligemma_with_expert.paligemma.model.multi_modal_projector.linear"
LM_HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
LANGUAGE = "paligemma_with_expert.paligemma.model.language_model"
EXPERT = "paligemma_with_expert.gemma_expert.model"
UNUSED = ("paligemma_with_expert.gemma_expert.lm_head.", "value_head.", "noise_head.")
"""Keys of a checkpoint that sampling never needs."""
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision tower; defaults are the released sizes, names those of arch.json."""

    hidden_size: int = 1152
    num_hidden_layers: int = RELEASED_VISION_LAYERS
    num_attention_heads: int = 16
    intermediate_size: int = 4304
    patch_size: int = 14
    image_size: int = 224
    num_channels: int = 3
    layer_norm_eps: float = 1e-6

    @property
    def patches(self) -> int:
        """Prefix tokens of one camera."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder stack; defaults are the released language model's."""

    hidden_size: int = 2048
    num_hidden_layers: int = RELEASED_LAYERS
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 256
    intermediate_size: int = 16384
    vocab_size: int = 257152
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Everything a peer needs to know to build the network."""

    vision: Vision = field(default_factory=Vision)
    text: Decoder = field(default_factory=Decoder)
    expert: Decoder = field(
        default_factory=lambda: Decoder(hidden_size=1024, intermediate_size=4096)
    )
    chunk: int = 50
    action_dim: int = 32
    steps: int = 10
    min_period: float = 0.004
    max_period: float = 4.0

    @classmethod
    def of_depth(cls, layers: int) -> Sizes:
        """Return the released sizes with ``layers`` decoder layers, the tower cut alike."""
        vision = max(1, math.ceil(RELEASED_VISION_LAYERS * layers / RELEASED_LAYERS))
        return cls(
            vision=Vision(num_hidden_layers=vision),
            text=Decoder(num_hidden_layers=layers),
            expert=Decoder(hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Sizes:
        """Return the sizes in ``config.json`` and ``arch.json`` of a checkpoint folder."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        arch = json.loads((folder / "arch.json").read_text(encoding="utf-8"))
        return cls(
            vision=Vision(**_known(Vision, arch["vision_config"])),
            text=Decoder(**_known(Decoder, arch["text_config"])),
            expert=Decoder(**_known(Decoder, arch["expert_config"])),
            chunk=config["chunk_size"],
            action_dim=config["max_action_dim"],
            steps=config["num_inference_steps"],
            min_period=config["min_period"],
            max_period=config["max_period"],
        )

    def positions(self, cameras: int, tokens: int) -> int:
        """Prefix positions of so many cameras and prompt tokens."""
        return cameras * self.vision.patches + tokens

    def arch_json(self) -> dict[str, Any]:
        return {
            "vision_config": asdict(self.vision),
            "text_config": asdict(self.text),
            "expert_config": asdict(self.expert),
        }

    def config_json(self) -> dict[str, Any]:
        """The fields of the official config that matter at inference."""
        size = self.vision.image_size
        feature = {"type": "VISUAL", "shape": [3, size, size]}
        inputs: dict[str, Any] = {f"observation.images.{name}": feature for name in CAMERAS}
        inputs["observation.state"] = {"type": "STATE", "shape": [32]}
        return {
            "type": "pi05",
            "input_features": inputs,
            "output_features": {"action": {"type": "ACTION", "shape": [self.action_dim]}},
            "chunk_size": self.chunk,
            "n_action_steps": self.chunk,
            "max_state_dim": 32,
            "max_action_dim": self.action_dim,
            "num_inference_steps": self.steps,
            "min_period": self.min_period,
            "max_period": self.max_period,
            "image_resolution": [size, size],
            "tokenizer_max_length": 200,
            "dtype": "bfloat16",
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of a base checkpoint, but the unused expert head."""
        yield from self._vision()
        yield LM_HEAD, (self.text.vocab_size, self.text.hidden_size)
        yield from self._decoder(LANGUAGE, self.text)
        yield from self._decoder(EXPERT, self.expert, adaptive=True)
        width = self.expert.hidden_size
        yield from _linear("action_in_proj", width, self.action_dim)
        yield from _linear("action_out_proj", self.action_dim, width)
        yield from _linear("time_mlp_in", width, width)
        yield from _linear("time_mlp_out", width, width)

    def _vision(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        v, width = self.vision, self.vision.hidden_size
        patch = f"{TOWER}.embeddings.patch_embedding"
        yield f"{patch}.weight", (width, v.num_channels, v.patch_size, v.patch_size)
        yield f"{patch}.bias", (width,)
        yield f"{TOWER}.embeddings.position_embedding.weight", (v.patches, width)
        for i in range(v.num_hidden_layers):
            layer = f"{TOWER}.encoder.layers.{i}"
            for norm in ("layer_norm1", "layer_norm2"):
                yield f"{layer}.{norm}.weight", (width,)
                yield f"{layer}.{norm}.bias", (width,)
            for leg in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _linear(f"{layer}.self_attn.{leg}", width, width)
            yield from _linear(f"{layer}.mlp.fc1", v.intermediate_size, width)
            yield from _linear(f"{layer}.mlp.fc2", width, v.intermediate_size)
        yield f"{TOWER}.post_layernorm.weight", (width,)
        yield f"{TOWER}.post_layernorm.bias", (width,)
        yield from _linear(PROJECTOR, self.text.hidden_size, width)

    def _decoder(
        self, root: str, d: Decoder, *, adaptive: bool = False
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        width, query = d.hidden_size, d.num_attention_heads * d.head_dim
        keys = d.num_key_value_heads * d.head_dim
        norms = [f"{root}.norm"]
        for i in range(d.num_hidden_layers):
            layer = f"{root}.layers.{i}"
            yield f"{layer}.self_attn.q_proj.weight", (query, width)
            yield f"{layer}.self_attn.k_proj.weight", (keys, width)
            yield f"{layer}.self_attn.v_proj.weight", (keys, width)
            yield f"{layer}.self_attn.o_proj.weight", (width, query)
            yield f"{layer}.mlp.gate_proj.weight", (d.intermediate_size, width)
            yield f"{layer}.mlp.up_proj.weight", (d.intermediate_size, width)
            yield f"{layer}.mlp.down_proj.weight", (width, d.intermediate_size)
            norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for norm in norms:
            if adaptive:
                yield from _linear(f"{norm}.dense", 3 * width, width)
            else:
                yield f"{norm}.weight", (width,)


def _linear(name: str, out: int, into: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def _known(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    return {name: table[name] for name in kind.__dataclass_fields__ if name in table}  # type: ignore[attr-defined]
