"""The whole computation of pi0 and pi0.5 in plain torch, nothing left out and nothing cached.

Written from the published formulas alone; imports nothing of the models under test. It runs every
camera through the tower, masked or not, keeps padded tokens in the sequence, computes every layer
in full, and starts each solver step from scratch: time MLP, adaRMS and the state token included.
Float32 on the CPU. Dims: B rows, L padded prefix, T suffix tokens, H heads, D head dim.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

HIDDEN = -2.3819763e38
PWE = "paligemma_with_expert."
VISION = PWE + "paligemma.model.vision_tower.vision_model."
PROJECTOR = PWE + "paligemma.model.multi_modal_projector.linear"
LANGUAGE = PWE + "paligemma.model.language_model."
EXPERT = PWE + "gemma_expert.model."
HEAD = PWE + "paligemma.lm_head.weight"


@dataclass(frozen=True)
class Batch:
    """images [B, C, 3, S, S] in [-1, 1]; image_mask [B, C]; tokens, token_mask [B, n];
    noise [B, T, A]; state [B, S] (pi0 only)."""

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    token_mask: Tensor
    noise: Tensor
    state: Tensor | None = None


@dataclass(frozen=True)
class Prefix:
    """embs [B, L, W]; valid [B, L]; keys and values per layer [B, L, K, D]."""

    embs: Tensor
    valid: Tensor
    keys: list[Tensor]
    values: list[Tensor]


class FullReference:
    """One checkpoint folder with ``config.json``, ``arch.json`` and ``model.safetensors``."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        arch = json.loads((folder / "arch.json").read_text())
        self.model: str = config["type"]
        self.chunk: int = config["chunk_size"]
        self.periods = (float(config["min_period"]), float(config["max_period"]))
        self.vision: dict[str, Any] = arch["vision_config"]
        self.text: dict[str, Any] = arch["text_config"]
        self.expert: dict[str, Any] = arch["expert_config"]
        raw = load_file(folder / "model.safetensors")
        self.w = {n.removeprefix("model."): t.float() for n, t in raw.items()}

    # ------------------------------------------------------------ whole requests

    def actions(self, batch: Batch, num_steps: int) -> Tensor:
        """Return x at t=0 [B, T, A]."""
        prefix = self.prefix(batch)
        x, dt = batch.noise, -1.0 / num_steps
        for k in range(num_steps):
            time = torch.tensor(1.0 + k * dt, dtype=torch.float64).float()
            x = x + dt * self.velocity(x, time, prefix, batch.state)
        return x

    def prefix(self, batch: Batch) -> Prefix:
        """Run cameras and prompt through tower and language model."""
        rows, cameras = batch.images.shape[:2]
        features = self._linear(PROJECTOR, self._tower(batch.images.flatten(0, 1)))
        patches = features.shape[1]
        table = self.w.get(LANGUAGE + "embed_tokens.weight", self.w[HEAD])
        text = F.embedding(batch.tokens, table) * math.sqrt(self.text["hidden_size"])
        embs = torch.cat([features.reshape(rows, cameras * patches, -1), text], dim=1)
        valid = torch.cat([batch.image_mask.repeat_interleave(patches, 1), batch.token_mask], dim=1)
        visible = valid[:, None, :] & valid[:, :, None]
        positions = torch.cumsum(valid, dim=1) - 1
        x, keys, values = embs, [], []
        for i in range(self.text["num_hidden_layers"]):
            name = f"{LANGUAGE}layers.{i}."
            n = self._rms(x, self.w[name + "input_layernorm.weight"])
            q, k, v = self._qkv(name, n, self.text, positions)
            keys.append(k)
            values.append(v)
            x = x + self._out(name, self._attend(q, k, v, visible))
            n = self._rms(x, self.w[name + "post_attention_layernorm.weight"])
            x = x + self._mlp(name, n)
        self._rms(x, self.w[LANGUAGE + "norm.weight"])
        return Prefix(embs, valid, keys, values)

    def velocity(self, x: Tensor, time: Tensor, prefix: Prefix, state: Tensor | None) -> Tensor:
        """Return the network's velocity [B, T, A] for x at a time, all rows at the same one."""
        rows = x.shape[0]
        embedded = self._time(time).expand(rows, -1)
        h = self._linear("action_in_proj", x)
        cond: Tensor | None = None
        if self.model == "pi0":
            h = torch.cat([h, embedded[:, None].expand(-1, self.chunk, -1)], dim=-1)
            h = self._linear("action_time_mlp_out", F.silu(self._linear("action_time_mlp_in", h)))
            assert state is not None
            h = torch.cat([self._linear("state_proj", state)[:, None], h], dim=1)
            blocks = torch.tensor([0] + [1] * self.chunk)
        else:
            cond = F.silu(self._linear("time_mlp_in", embedded))
            cond = F.silu(self._linear("time_mlp_out", cond))
            blocks = torch.zeros(self.chunk, dtype=torch.int64)
        hidden = self._suffix(h, cond, blocks, prefix)
        return self._linear("action_out_proj", hidden[:, -self.chunk :])

    # ------------------------------------------------------------ networks

    def _tower(self, images: Tensor) -> Tensor:
        """Images [N, 3, S, S] -> features [N, P, W]."""
        width, heads = self.vision["hidden_size"], self.vision["num_attention_heads"]
        eps = self.vision["layer_norm_eps"]
        conv = VISION + "embeddings.patch_embedding"
        x = F.conv2d(
            images,
            self.w[f"{conv}.weight"],
            self.w[f"{conv}.bias"],
            stride=self.vision["patch_size"],
        )
        x = x.flatten(2).transpose(1, 2) + self.w[VISION + "embeddings.position_embedding.weight"]

        def norm(name: str, x: Tensor) -> Tensor:
            return F.layer_norm(x, (width,), self.w[name + ".weight"], self.w[name + ".bias"], eps)

        for i in range(self.vision["num_hidden_layers"]):
            name = f"{VISION}encoder.layers.{i}."
            n = norm(name + "layer_norm1", x)
            q, k, v = (
                self._linear(f"{name}self_attn.{p}_proj", n).unflatten(-1, (heads, -1))
                for p in "qkv"
            )
            mixed = self._attend(q, k, v, None).flatten(2)
            x = x + self._linear(name + "self_attn.out_proj", mixed)
            n = self._linear(name + "mlp.fc1", norm(name + "layer_norm2", x))
            x = x + self._linear(name + "mlp.fc2", F.gelu(n, approximate="tanh"))
        return norm(VISION + "post_layernorm", x)

    def _suffix(self, x: Tensor, cond: Tensor | None, blocks: Tensor, prefix: Prefix) -> Tensor:
        """Return the expert's final-norm output [B, T, W] over prefix and suffix keys."""
        rows, count, _ = x.shape
        to_prefix = prefix.valid[:, None, :].expand(-1, count, -1)
        to_suffix = (blocks[None, :] <= blocks[:, None])[None].expand(rows, -1, -1)
        visible = torch.cat([to_prefix, to_suffix], dim=-1)
        positions = prefix.valid.sum(dim=1, keepdim=True) + torch.arange(count)
        for i in range(self.expert["num_hidden_layers"]):
            name = f"{EXPERT}layers.{i}."
            n, gate = self._norm(name + "input_layernorm", x, cond)
            q, k, v = self._qkv(name, n, self.expert, positions)
            k = torch.cat([prefix.keys[i], k], dim=1)
            v = torch.cat([prefix.values[i], v], dim=1)
            x = x + gate * self._out(name, self._attend(q, k, v, visible))
            n, gate = self._norm(name + "post_attention_layernorm", x, cond)
            x = x + gate * self._mlp(name, n)
        return self._norm(EXPERT + "norm", x, cond)[0]

    def _norm(self, name: str, x: Tensor, cond: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """Return the normalised x and the gate of the sub-layer that follows."""
        if cond is None:
            return self._rms(x, self.w[name + ".weight"]), 1.0
        scale, shift, gate = self._linear(name + ".dense", cond)[:, None].chunk(3, dim=-1)
        return self._rms(x, scale) + shift, gate

    def _rms(self, x: Tensor, offset: Tensor) -> Tensor:
        eps: float = self.text["rms_norm_eps"]
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * (1.0 + offset)

    def _qkv(
        self, name: str, n: Tensor, sizes: dict[str, Any], positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim = sizes["head_dim"]
        q, k, v = (
            self._linear(f"{name}self_attn.{p}_proj", n).unflatten(-1, (-1, dim)) for p in "qkv"
        )
        return self._rotate(q, positions, sizes), self._rotate(k, positions, sizes), v

    @staticmethod
    def _rotate(x: Tensor, positions: Tensor, sizes: dict[str, Any]) -> Tensor:
        half = sizes["head_dim"] // 2
        frequency = sizes["rope_theta"] ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = positions.float()[..., None, None] * frequency
        low, high = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
        """q [B, T, H, D], k and v [B, S, K, D], visible [B, T, S] -> [B, T, H, D]."""
        groups = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        if visible is not None:
            scores = scores + torch.where(visible, 0.0, HIDDEN)[:, None]
        return torch.einsum("bhts,bshd->bthd", scores.softmax(dim=-1), v)

    def _out(self, name: str, mixed: Tensor) -> Tensor:
        return self._linear(name + "self_attn.o_proj", mixed.flatten(2))

    def _mlp(self, name: str, n: Tensor) -> Tensor:
        gate, up = (self._linear(f"{name}mlp.{p}_proj", n) for p in ("gate", "up"))
        return self._linear(name + "mlp.down_proj", F.gelu(gate, approximate="tanh") * up)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[name + ".weight"], self.w.get(name + ".bias"))

    def _time(self, time: Tensor) -> Tensor:
        """Return e(t) [W]: sines, then cosines, angles in float64."""
        half, (low, high) = self.expert["hidden_size"] // 2, self.periods
        j = torch.arange(half, dtype=torch.float64) / (half - 1)
        angles = time.double() * 2.0 * math.pi / (low * (high / low) ** j)
        return torch.cat([angles.sin(), angles.cos()]).float()
