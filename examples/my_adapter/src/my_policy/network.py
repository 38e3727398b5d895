"""The network: an encoder that runs once per request, a denoiser that runs once per step.

Dims: B rows, P image patches, L prompt tokens, H horizon, A action dim, W width.
"""

from __future__ import annotations

import math

import torch
from phyai.cache import Cache
from phyai.layers import Linear, Placement, VisionConfig, VisionTower
from phyai.types import BufferSpec, Grid, Prediction, Step
from phyai.weights import claim
from torch import Tensor, nn

from my_policy.config import PolicyConfig

EPS = 1e-6


class Encoder(nn.Module):
    """What does not change during the solver loop: image patches and the task."""

    def __init__(self, config: PolicyConfig, at: Placement) -> None:
        super().__init__()
        width = config.width
        vision = VisionConfig(
            width,
            config.vision_layers,
            config.heads,
            2 * width,
            config.patch_size,
            config.image_size,
        )
        self.tower = VisionTower("vision", vision, at)
        self.words = claim(at.parameter(len(config.words) + 1, width), "words.weight")
        # The prompt scales the channels of the image: what was asked for stands out.
        self.prompt_scale = Linear("prompt_scale", width, width, at, bias=True)
        self.state_in = Linear("state_in", config.state_dim, width, at, bias=True)

    def forward(
        self, image: Tensor, state: Tensor, tokens: Tensor, length: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return patches [B, P, W] and task [B, W], the words plus the state.

        Padding is left out by the mask, so a row does not depend on how far it was padded.
        """
        valid = torch.arange(tokens.shape[1], device=tokens.device) < length[:, None]
        words = self.words[tokens] * valid[..., None].to(self.words.dtype)
        prompt = words.sum(dim=1)
        patches = self.tower(image) * (1.0 + self.prompt_scale(prompt))[:, None]
        return patches, prompt + self.state_in(state.to(prompt.dtype))


class Block(nn.Module):
    """Action tokens look at each other, at the image, and think; each part is modulated."""

    def __init__(self, name: str, config: PolicyConfig, at: Placement) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.scale = (width // self.heads) ** -0.5
        patches = (config.image_size // config.patch_size) ** 2
        self.qkv = Linear([f"{name}.{n}" for n in ("q", "k", "v")], width, [width] * 3, at)
        self.out = Linear(f"{name}.out", width, width, at)
        self.image_q = Linear(f"{name}.image_q", width, width, at)
        self.image_kv = Linear([f"{name}.image_{n}" for n in "kv"], width, [width] * 2, at)
        self.image_out = Linear(f"{name}.image_out", width, width, at)
        self.up = Linear(f"{name}.up", width, 2 * width, at, bias=True, epilogue="gelu_tanh")
        self.down = Linear(f"{name}.down", 2 * width, width, at, bias=True)
        sizes = {"head_dim": width // self.heads, "heads": self.heads, "kv_heads": self.heads}
        queries = config.horizon
        self.look_around = at.select(
            "attention", queries=queries, keys=queries, masked=False, **sizes
        )
        self.look_at = at.select("attention", queries=queries, keys=patches, masked=False, **sizes)
        self.norm = at.select("ada_rms_norm", width=width)

    def image_keys(self, patches: Tensor) -> Tensor:
        """Return K and V of the image, [B, P, 2, heads, D]."""
        return self._split(self.image_kv(patches), 2)

    def forward(self, x: Tensor, image: Tensor, modulation: Tensor) -> Tensor:
        """Return x [B, H, W] after the block.

        Shapes: image as ``image_keys`` gives it; modulation [9, W] or [9, B, 1, W]: shift, scale
            and gate of the three parts.
        """
        shift, scale, gate = modulation[0:3], modulation[3:6], modulation[6:9]
        q, k, v = self._split(self.qkv(self._modulated(x, scale[0], shift[0])), 3).unbind(2)
        x = x + gate[0] * self.out(self.look_around(q, k, v, self.scale).flatten(2))
        q = self._split(self.image_q(self._modulated(x, scale[1], shift[1])), 1)[:, :, 0]
        k, v = image.unbind(2)
        x = x + gate[1] * self.image_out(self.look_at(q, k, v, self.scale).flatten(2))
        thought: Tensor = self.down(self.up(self._modulated(x, scale[2], shift[2])))
        return x + gate[2] * thought

    def _modulated(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        out: Tensor = self.norm(x, scale, shift, EPS)
        return out

    def _split(self, x: Tensor, parts: int) -> Tensor:
        return x.view(*x.shape[:2], parts, self.heads, -1)


class FlowDenoiser(nn.Module):
    """Velocity (noise - data) of leaf ``action``; the noise level enters through tables."""

    prediction: Prediction = "velocity"

    def __init__(self, config: PolicyConfig, at: Placement) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.action_in = Linear("action_in", config.action_dim, width, at, bias=True)
        self.positions = claim(at.parameter(config.horizon, width), "positions.weight")
        self.blocks = nn.ModuleList(Block(f"blocks.{i}", config, at) for i in range(config.layers))
        self.rows = 9 * config.layers + 2
        self.time_in = Linear("time_in", width, width, at, bias=True, epilogue="silu")
        self.time_out = Linear("time_out", width, self.rows * width, at, bias=True)
        self.norm = at.select("ada_rms_norm", width=width)
        self.action_out = Linear("action_out", width, config.action_dim, at, bias=True)
        self.tables: dict[tuple[float, ...], Tensor] = {}

    # ------------------------------------------------------------ once per grid

    def prepare_grid(self, grid: Grid) -> None:
        """Compute the modulations of every step of a grid: they depend on weights only."""
        sigmas = grid[0].grid
        if sigmas not in self.tables:
            self.tables[sigmas] = self._table(sigmas)

    def release_grid(self, grid: Grid) -> None:
        self.tables.pop(grid[0].grid, None)

    def refresh(self) -> None:
        """Rewrite the tables in place, after a weight update."""
        for sigmas, table in self.tables.items():
            table.copy_(self._table(sigmas))

    def _table(self, sigmas: tuple[float, ...]) -> Tensor:
        levels = torch.tensor(sigmas, dtype=torch.float32, device=self.positions.device)
        with torch.no_grad():
            return self.modulation(levels).contiguous()

    def modulation(self, levels: Tensor) -> Tensor:
        """Return shifts, scales and gates of noise levels [N]: [N, 9 * layers + 2, W]."""
        half = self.config.width // 2
        frequencies = torch.exp(torch.arange(half, device=levels.device) * (-math.log(1e3) / half))
        angles = 100.0 * levels[:, None] * frequencies
        embedding = torch.cat((angles.sin(), angles.cos()), dim=-1).to(self.positions.dtype)
        out: Tensor = self.time_out(self.time_in(embedding))
        return out.view(len(levels), self.rows, -1)

    # ------------------------------------------------------------ once per request

    def cache_buffers(self) -> dict[str, BufferSpec]:
        config = self.config
        patches = (config.image_size // config.patch_size) ** 2
        head = (config.heads, config.width // config.heads)
        dtype = self.positions.dtype
        shape = (patches, 2, *head)
        image = {f"image_kv.{i}": BufferSpec(shape, dtype) for i in range(config.layers)}
        return {**image, "task": BufferSpec((config.width,), dtype)}

    def image_keys(self, patches: Tensor) -> list[Tensor]:
        """Return K and V of the image for every block."""
        keys: list[Tensor] = [block.image_keys(patches) for block in self._blocks()]
        return keys

    # ------------------------------------------------------------ once per step

    def forward(self, x: dict[str, Tensor], step: Step, cache: Cache) -> dict[str, Tensor]:
        image = [cache[f"image_kv.{i}"] for i in range(len(self.blocks))]
        modulation = step.row(self.tables[step.grid])
        return {"action": self.velocity(x["action"], cache["task"], image, modulation)}

    def velocity(self, x: Tensor, task: Tensor, image: list[Tensor], modulation: Tensor) -> Tensor:
        """Return the velocity [B, H, A] float32.

        Shapes: x [B, H, A]; task [B, W]; modulation [R, W], or [R, B, 1, W] in training.
        """
        dtype = self.positions.dtype
        tokens = self.action_in(x.to(dtype)) + self.positions + task[:, None]
        for i, block in enumerate(self._blocks()):
            tokens = block(tokens, image[i], modulation[9 * i : 9 * i + 9])
        tokens = self.norm(tokens, modulation[-2], modulation[-1], EPS)
        out: Tensor = self.action_out(tokens)
        return out.float()

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]
