"""Sizes of one checkpoint of pi0 or pi0.5: its tensors, their random values, a request."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from benchmarks.peers.shapes import Shapes, gated_mlp, grouped_attention, linear, siglip
from torch import Tensor

RELEASED_LAYERS = 18
RELEASED_VISION_LAYERS = 27
TOKENS = {"pi0": 48, "pi05": 200}  # the prompt as it is padded


Pi = Literal["pi0", "pi05"]


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
class PiSizes:
    """Everything a peer needs to know to build the network."""

    vision: Vision = field(default_factory=Vision)
    text: Decoder = field(default_factory=Decoder)
    expert: Decoder = field(
        default_factory=lambda: Decoder(hidden_size=1024, intermediate_size=4096)
    )
    chunk: int = 50
    action_dim: int = 32
    state_dim: int = 32
    steps: int = 10
    min_period: float = 0.004
    max_period: float = 4.0
    model: Pi = "pi05"

    @classmethod
    def of_depth(cls, layers: int, model: Pi = "pi05") -> Self:
        """Return the released sizes with ``layers`` decoder layers, the tower cut alike."""
        vision = max(1, math.ceil(RELEASED_VISION_LAYERS * layers / RELEASED_LAYERS))
        return cls(
            vision=Vision(num_hidden_layers=vision),
            text=Decoder(num_hidden_layers=layers),
            expert=Decoder(hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers),
            model=model,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Return the sizes in ``config.json`` and ``arch.json`` of a checkpoint folder."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        arch = json.loads((folder / "arch.json").read_text(encoding="utf-8"))
        return cls(
            vision=Vision(**_known(Vision, arch["vision_config"])),
            text=Decoder(**_known(Decoder, arch["text_config"])),
            expert=Decoder(**_known(Decoder, arch["expert_config"])),
            chunk=config["chunk_size"],
            action_dim=config["max_action_dim"],
            state_dim=config["max_state_dim"],
            steps=config["num_inference_steps"],
            min_period=config["min_period"],
            max_period=config["max_period"],
            model=config["type"],
        )

    def positions(self, cameras: int, tokens: int) -> int:
        """Prefix positions of so many cameras and prompt tokens."""
        return cameras * self.vision.patches + tokens

    @property
    def layers(self) -> int:
        return self.text.num_hidden_layers

    @property
    def vision_layers(self) -> int:
        return self.vision.num_hidden_layers

    def files(self) -> dict[str, Any]:
        """Return the JSON files beside the weights, by name."""
        return {"arch.json": self.arch_json(), "config.json": self.config_json()}

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
        inputs["observation.state"] = {"type": "STATE", "shape": [self.state_dim]}
        return {
            "type": self.model,
            "input_features": inputs,
            "output_features": {"action": {"type": "ACTION", "shape": [self.action_dim]}},
            "chunk_size": self.chunk,
            "n_action_steps": self.chunk,
            "max_state_dim": self.state_dim,
            "max_action_dim": self.action_dim,
            "num_inference_steps": self.steps,
            "min_period": self.min_period,
            "max_period": self.max_period,
            "image_resolution": [size, size],
            "tokenizer_max_length": TOKENS[self.model],
            "dtype": "bfloat16",
        }

    def tensors(self) -> Shapes:
        """Yield name and shape of every tensor of a base checkpoint, but the unused expert head."""
        yield from self._vision()
        yield LM_HEAD, (self.text.vocab_size, self.text.hidden_size)
        yield from self._decoder(LANGUAGE, self.text)
        yield from self._decoder(EXPERT, self.expert, adaptive=self.model == "pi05")
        width = self.expert.hidden_size
        yield from linear("action_in_proj", width, self.action_dim)
        yield from linear("action_out_proj", self.action_dim, width)
        if self.model == "pi0":
            yield from linear("state_proj", width, self.state_dim)
            yield from linear("action_time_mlp_in", width, 2 * width)
            yield from linear("action_time_mlp_out", width, width)
        else:
            yield from linear("time_mlp_in", width, width)
            yield from linear("time_mlp_out", width, width)

    def _vision(self) -> Shapes:
        v, width = self.vision, self.vision.hidden_size
        yield from siglip(
            TOWER,
            width=width,
            mlp=v.intermediate_size,
            layers=v.num_hidden_layers,
            channels=v.num_channels,
            patch=v.patch_size,
            places=v.patches,
        )
        yield from linear(PROJECTOR, self.text.hidden_size, width)

    def _decoder(self, root: str, d: Decoder, *, adaptive: bool = False) -> Shapes:
        width, query = d.hidden_size, d.num_attention_heads * d.head_dim
        keys = d.num_key_value_heads * d.head_dim
        norms = [f"{root}.norm"]
        for i in range(d.num_hidden_layers):
            layer = f"{root}.layers.{i}"
            yield from grouped_attention(layer, width, query, keys)
            yield from gated_mlp(layer, width, d.intermediate_size)
            norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        for norm in norms:
            if adaptive:
                yield from linear(f"{norm}.dense", 3 * width, width)
            else:
                yield f"{norm}.weight", (width,)

    def inputs(
        self, cameras: int, tokens: int, rows: int, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Return a request of valid cameras and tokens only; names and shapes: ``batch.Batch``."""
        side, channels = self.vision.image_size, self.vision.num_channels
        found = {
            "images": torch.rand(rows, cameras, channels, side, side, generator=random) * 2 - 1,
            "image_masks": torch.ones(rows, cameras, dtype=torch.bool),
            "tokens": torch.randint(1, self.text.vocab_size, (rows, tokens), generator=random),
            "token_mask": torch.ones(rows, tokens, dtype=torch.bool),
            "noise": torch.randn(rows, self.chunk, self.action_dim, generator=random),
        }
        if self.model == "pi0":
            found["state"] = torch.rand(rows, self.state_dim, generator=random) * 2 - 1
        return found

    def moments(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return mean and standard deviation that keep every activation of order one.

        Gates are random around zero with deviation ~0.5, so that no sub-layer is switched off.
        """
        if "layer_norm" in name or "post_layernorm" in name:  # the tower's: scale and bias
            return (1.0, 0.1) if name.endswith("weight") else (0.0, 0.1)
        if name.endswith("norm.weight"):  # decoder norms store the offset from one
            return 0.0, 0.1
        if name.endswith("dense.bias"):
            return 0.0, 0.3
        if len(shape) == 1:
            return 0.0, 0.05
        if "position_embedding" in name:
            return 0.0, 0.5
        fan_in = math.prod(shape[1:])
        gain = 2.0 if name.startswith(("time_mlp", "action_time_mlp")) else 1.0
        return 0.0, gain / math.sqrt(shape[1] if name == LM_HEAD else fan_in)


def _known(kind: type, table: dict[str, Any]) -> dict[str, Any]:
    return {name: table[name] for name in kind.__dataclass_fields__ if name in table}  # type: ignore[attr-defined]
