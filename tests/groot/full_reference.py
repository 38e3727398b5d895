"""The whole network row by row, with nothing left out and nothing kept: plain torch, float32.

Reads the checkpoint's tensors directly. Every mask, position and table is made here anew, and a
batch is its rows one after another, so it shares no code with what it checks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor

V, L, A = "backbone.model.model.visual", "backbone.model.model.language_model", "action_head"


@dataclass(frozen=True)
class RowInputs:
    """One row: ids [S], pixels [N, values], its images' grids, state [steps, D], noise [T, A]."""

    ids: Tensor
    pixels: Tensor
    grids: Sequence[tuple[int, int, int]]
    state: Tensor
    embodiment: int
    noise: Tensor


class FullReference:
    """The network of one checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        self.w = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        backbone = json.loads((folder / "qwen3_vl_config.json").read_text())
        self.vision, self.text = backbone["vision_config"], backbone["text_config"]
        self.image_token = backbone["image_token_id"]

    def actions(self, rows: Sequence[RowInputs], steps: int) -> Tensor:
        """Return [B, T, A] after ``steps`` Euler steps."""
        return torch.stack([self._row_actions(row, steps) for row in rows])

    # ------------------------------------------------------------ backbone

    def features(self, row: RowInputs) -> Tensor:
        """Return the output of the last language layer [S, W], before the final norm."""
        merged, deep = self.images(row.pixels, row.grids)
        x = self.w[f"{L}.embed_tokens.weight"][row.ids].clone()
        is_image = row.ids == self.image_token
        x[is_image] = merged
        cos, sin = self._text_rope(row)
        causal = torch.full((len(x), len(x)), -math.inf).triu(1)
        for i in range(self.config["select_layer"]):
            x = self._text_layer(f"{L}.layers.{i}", x, cos, sin, causal)
            if i < len(deep):
                x[is_image] += deep[i]
        return x

    def images(
        self, pixels: Tensor, grids: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return merged features [N/4, W] and the deepstack features of each tap."""
        parts, at = [], 0
        for grid in grids:
            count = math.prod(grid)
            parts.append(self._image(pixels[at : at + count], grid))
            at += count
        merged = torch.cat([part[0] for part in parts])
        taps = range(len(self.vision["deepstack_visual_indexes"]))
        return merged, [torch.cat([part[1][j] for part in parts]) for j in taps]

    def _image(self, pixels: Tensor, grid: tuple[int, int, int]) -> tuple[Tensor, list[Tensor]]:
        width, heads = self.vision["hidden_size"], self.vision["num_heads"]
        weight = self.w[f"{V}.patch_embed.proj.weight"].reshape(width, -1)
        x = pixels @ weight.T + self.w[f"{V}.patch_embed.proj.bias"] + self._positions(grid)
        row, column = self._coordinates(grid)
        dim = width // heads
        inverse = 1e4 ** (-torch.arange(0, dim // 2, 2).float() / (dim // 2))
        angles = torch.cat([row[:, None] * inverse, column[:, None] * inverse], -1).repeat(1, 2)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        deep: list[Tensor] = []
        for i in range(self.vision["depth"]):
            name = f"{V}.blocks.{i}"
            n = self._norm(x, f"{name}.norm1", 1e-6)
            q, k, v = self._linear(n, f"{name}.attn.qkv").view(-1, 3, heads, dim).unbind(1)
            q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
            x = x + self._linear(_attend(q, k, v), f"{name}.attn.proj")
            n = self._norm(x, f"{name}.norm2", 1e-6)
            n = F.gelu(self._linear(n, f"{name}.mlp.linear_fc1"), approximate="tanh")
            x = x + self._linear(n, f"{name}.mlp.linear_fc2")
            if i in self.vision["deepstack_visual_indexes"]:
                name = f"{V}.deepstack_merger_list.{len(deep)}"
                joined = self._norm(x.reshape(-1, 4 * width), f"{name}.norm", 1e-6)
                deep.append(self._merge(joined, name))
        normed = self._norm(x, f"{V}.merger.norm", 1e-6)
        return self._merge(normed.reshape(-1, 4 * width), f"{V}.merger"), deep

    def _merge(self, joined: Tensor, name: str) -> Tensor:
        hidden = F.gelu(self._linear(joined, f"{name}.linear_fc1"))
        return self._linear(hidden, f"{name}.linear_fc2")

    def _coordinates(self, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Return row and column of each patch, in blocks of two by two."""
        _, height, width = grid
        table = torch.stack(
            torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), -1
        )
        blocks = table.view(height // 2, 2, width // 2, 2, 2).transpose(1, 2).reshape(-1, 2)
        return blocks[:, 0], blocks[:, 1]

    def _positions(self, grid: tuple[int, int, int]) -> Tensor:
        """Return the learned positions, sampled bilinearly at each patch."""
        table = self.w[f"{V}.pos_embed.weight"]
        side = math.isqrt(len(table))
        row, column = self._coordinates(grid)
        y = torch.linspace(0, side - 1, grid[1])[row]
        x = torch.linspace(0, side - 1, grid[2])[column]
        y0, x0 = y.int(), x.int()
        y1, x1 = (y0 + 1).clamp(max=side - 1), (x0 + 1).clamp(max=side - 1)
        fy, fx = (y - y0)[:, None], (x - x0)[:, None]
        top = table[y0 * side + x0] * (1 - fx) + table[y0 * side + x1] * fx
        bottom = table[y1 * side + x0] * (1 - fx) + table[y1 * side + x1] * fx
        return top * (1 - fy) + bottom * fy

    def _text_rope(self, row: RowInputs) -> tuple[Tensor, Tensor]:
        places: list[tuple[int, int, int]] = []
        counter, images, i = 0, iter(row.grids), 0
        ids = row.ids.tolist()
        while i < len(ids):
            if ids[i] != self.image_token:
                places.append((counter,) * 3)
                counter, i = counter + 1, i + 1
                continue
            _, height, width = next(images)
            height, width = height // 2, width // 2
            places += [
                (counter, counter + r, counter + c) for r in range(height) for c in range(width)
            ]
            counter, i = counter + max(height, width), i + height * width
        section = self.text["rope_scaling"]["mrope_section"]
        half = self.text["head_dim"] // 2
        inverse = self.text["rope_theta"] ** (-torch.arange(half).float() / half)
        axis = [0] * half
        for j in range(half):
            if j % 3 and j < 3 * section[j % 3]:
                axis[j] = j % 3
        angles = torch.tensor(places).float()[:, axis] * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos()[:, None], angles.sin()[:, None]

    def _text_layer(self, name: str, x: Tensor, cos: Tensor, sin: Tensor, causal: Tensor) -> Tensor:
        dim, eps = self.text["head_dim"], self.text["rms_norm_eps"]
        n = _rms(x, self.w[f"{name}.input_layernorm.weight"], eps)
        q, k, v = (
            (n @ self.w[f"{name}.self_attn.{leg}_proj.weight"].T).view(len(x), -1, dim)
            for leg in "qkv"
        )
        q = _rms(q, self.w[f"{name}.self_attn.q_norm.weight"], eps)
        k = _rms(k, self.w[f"{name}.self_attn.k_norm.weight"], eps)
        q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        x = x + _attend(q, k, v, causal) @ self.w[f"{name}.self_attn.o_proj.weight"].T
        n = _rms(x, self.w[f"{name}.post_attention_layernorm.weight"], eps)
        gate = F.silu(n @ self.w[f"{name}.mlp.gate_proj.weight"].T)
        up = n @ self.w[f"{name}.mlp.up_proj.weight"].T
        return x + (gate * up) @ self.w[f"{name}.mlp.down_proj.weight"].T

    # ------------------------------------------------------------ head

    def _row_actions(self, row: RowInputs, steps: int) -> Tensor:
        h = self.features(row)
        if self.config.get("use_vlln", True):
            h = self._norm(h, f"{A}.vlln", 1e-5)
        vl: Any = self.config.get("vl_self_attention_cfg")
        for i in range(vl["num_layers"] if vl else 0):
            name = f"{A}.vl_self_attention.transformer_blocks.{i}"
            n = self._norm(h, f"{name}.norm1", 1e-5)
            h = h + self._attention(n, n, f"{name}.attn1", vl["num_attention_heads"])
            h = h + self._feed_forward(self._norm(h, f"{name}.norm3", 1e-5), f"{name}.ff")
        state = torch.relu(self._bank(row.state.reshape(1, -1), "state_encoder.layer1", row))
        token = self._bank(state, "state_encoder.layer2", row)
        image = row.ids == self.image_token
        x, buckets = row.noise, self.config.get("num_timestep_buckets", 1000)
        for i in range(steps):
            x = x + self._velocity(x, int(i / steps * buckets), token, h, image, row) / steps
        return x

    def _velocity(
        self, x: Tensor, time: int, token: Tensor, h: Tensor, image: Tensor, row: RowInputs
    ) -> Tensor:
        width, dit = self.config["input_embedding_dim"], self.config["diffusion_model_cfg"]
        half = width // 2
        angles = time * torch.exp(-torch.arange(half) * (torch.tensor(1e4).log() / half))
        p = torch.cat([angles.sin(), angles.cos()]).expand(len(x), -1)
        a = torch.cat([self._bank(x, "action_encoder.W1", row), p], -1)
        a = self._bank(F.silu(self._bank(a, "action_encoder.W2", row)), "action_encoder.W3", row)
        if self.config.get("add_pos_embed", True):
            a = a + self.w[f"{A}.position_embedding.weight"][: len(x)]
        z = torch.cat([token, a])
        angles = time * torch.exp(-math.log(1e4) * torch.arange(128) / 127)
        g = torch.cat([angles.cos(), angles.sin()])
        name = f"{A}.model.timestep_encoder.timestep_embedder"
        temb = self._linear(F.silu(self._linear(g, f"{name}.linear_1")), f"{name}.linear_2")
        every = 2 * self.config["attend_text_every_n_blocks"]
        for i in range(dit["num_layers"]):
            name = f"{A}.model.transformer_blocks.{i}"
            scale, shift = self._linear(F.silu(temb), f"{name}.norm1.linear").chunk(2)
            n = F.layer_norm(z, (width,), eps=1e-5) * (1 + scale) + shift
            seen = ~image if i % every == 0 else image
            if not self.config.get("use_alternate_vl_dit", True):
                seen = torch.ones_like(image)
            keys = n if i % 2 else h[seen]
            z = z + self._attention(n, keys, f"{name}.attn1", dit["num_attention_heads"])
            z = z + self._feed_forward(F.layer_norm(z, (width,), eps=1e-5), f"{name}.ff")
        shift, scale = self._linear(F.silu(temb), f"{A}.model.proj_out_1").chunk(2)
        out = F.layer_norm(z, (width,), eps=1e-6) * (1 + scale) + shift
        out = self._linear(out, f"{A}.model.proj_out_2")[1:]
        hidden = torch.relu(self._bank(out, "action_decoder.layer1", row))
        return self._bank(hidden, "action_decoder.layer2", row)

    def _bank(self, x: Tensor, name: str, row: RowInputs) -> Tensor:
        return x @ self.w[f"{A}.{name}.W"][row.embodiment] + self.w[f"{A}.{name}.b"][row.embodiment]

    def _attention(self, x: Tensor, keys: Tensor, name: str, heads: int) -> Tensor:
        q = self._linear(x, f"{name}.to_q").view(len(x), heads, -1)
        k = self._linear(keys, f"{name}.to_k").view(len(keys), heads, -1)
        v = self._linear(keys, f"{name}.to_v").view(len(keys), heads, -1)
        return self._linear(_attend(q, k, v), f"{name}.to_out.0")

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        hidden = F.gelu(self._linear(x, f"{name}.net.0.proj"), approximate="tanh")
        return self._linear(hidden, f"{name}.net.2")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return attention [T, H * D] of q [T, H, D] over k, v [S, H, D]."""
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    return torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)


def _turned(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([-high, low], -1)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
