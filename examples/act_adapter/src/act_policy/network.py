"""The network: image patches and state are encoded, learned queries read the chunk off them.

Zhao et al., Learning Fine-Grained Bimanual Manipulation with Low-Cost Hardware (2023): at inference
the style variable is zero, so its token is a constant, part of ``latent`` here.
Dims: B rows, S encoder tokens, H horizon, A action dim, W width.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from phyai.cache import Cache
from phyai.errors import CheckpointError
from phyai.layers import LayerNorm, Linear, Placement, VisionConfig, VisionTower
from phyai.types import Prediction, Step
from phyai.weights import claim
from torch import Tensor, nn

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class ACTConfig:
    """Sizes of the policy, from the checkpoint's config.json."""

    width: int = 64
    heads: int = 4
    vision_layers: int = 1
    decoder_layers: int = 2
    image_size: int = 32
    patch_size: int = 8
    state_dim: int = 7
    action_dim: int = 7
    horizon: int = 20

    @classmethod
    def from_folder(cls, folder: Path) -> ACTConfig:
        try:
            data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            return cls(**{field.name: int(data[field.name]) for field in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{folder / 'config.json'} must hold the sizes of the policy; got {error!r}."
            ) from error

    def save(self, folder: Path) -> None:
        text = json.dumps({"type": "act_policy", **asdict(self)}, indent=1)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")

    @property
    def tokens(self) -> int:
        """Return S: the patches, the state and the latent."""
        return (self.image_size // self.patch_size) ** 2 + 2


class DecoderLayer(nn.Module):
    """q += Attn(LN1(q), memory); q += MLP(LN2(q))."""

    def __init__(self, name: str, config: ACTConfig, at: Placement) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.scale = (width // self.heads) ** -0.5
        self.norm1 = LayerNorm(f"{name}.norm1", width, EPS, at)
        self.q = Linear(f"{name}.q", width, width, at, bias=True)
        self.kv = Linear([f"{name}.k", f"{name}.v"], width, [width] * 2, at, bias=True)
        self.out = Linear(f"{name}.out", width, width, at, bias=True)
        self.norm2 = LayerNorm(f"{name}.norm2", width, EPS, at)
        self.up = Linear(f"{name}.up", width, 4 * width, at, bias=True, epilogue="gelu_tanh")
        self.down = Linear(f"{name}.down", 4 * width, width, at, bias=True)
        self.attention = at.select(
            "attention",
            head_dim=width // self.heads,
            heads=self.heads,
            kv_heads=self.heads,
            queries=config.horizon,
            keys=config.tokens,
            masked=False,
        )

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """Return x [B, H, W] after the layer; memory [B, S, W]."""
        rows, queries, _ = x.shape
        q = self.q(self.norm1(x)).view(rows, queries, self.heads, -1)
        k, v = self.kv(memory).view(rows, memory.shape[1], 2, self.heads, -1).unbind(2)
        x = x + self.out(self.attention(q, k, v, self.scale).flatten(2))
        out: Tensor = x + self.down(self.up(self.norm2(x)))
        return out


class ACT(nn.Module):
    """The chunk itself, from ``cache.inputs``: one call, nothing kept between calls."""

    prediction: Prediction = "clean"

    def __init__(self, config: ACTConfig, at: Placement) -> None:
        super().__init__()
        width = config.width
        vision = VisionConfig(
            width,
            config.vision_layers,
            config.heads,
            4 * width,
            config.patch_size,
            config.image_size,
        )
        self.tower = VisionTower("vision", vision, at)
        self.state_in = Linear("state_in", config.state_dim, width, at, bias=True)
        self.latent = claim(at.parameter(1, width), "latent.weight")
        self.queries = claim(at.parameter(config.horizon, width), "queries.weight")
        self.layers = nn.ModuleList(
            DecoderLayer(f"decoder.{i}", config, at) for i in range(config.decoder_layers)
        )
        self.norm = LayerNorm("norm", width, EPS, at)
        self.head = Linear("head", width, config.action_dim, at, bias=True)

    def forward(self, x: dict[str, Tensor], step: Step, cache: Cache) -> dict[str, Tensor]:
        patches = self.tower(cache.inputs["image"])
        state = self.state_in(cache.inputs["state"].to(patches.dtype))[:, None]
        rows = patches.shape[0]
        memory = torch.cat((self.latent.expand(rows, 1, -1), state, patches), dim=1)
        tokens = self.queries.expand(rows, -1, -1)
        for layer in self.layers:
            tokens = layer(tokens, memory)
        return {"action": self.head(self.norm(tokens)).float()}
