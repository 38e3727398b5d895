"""The action head alone, over a cache of its own: random heads, golden heads, and a plain truth.

``PlainHead`` computes one row at a time from the checkpoint's tensors, keeps nothing, and builds
no table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from phyai.cache import Cache
from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.memory import Arena
from phyai.models.minicpm_robot.config import HeadSizes, MiniCPMRobotConfig, TextSizes, VisionSizes
from phyai.models.minicpm_robot.network.denoiser import MiniCPMDenoiser
from phyai.models.minicpm_robot.solver import CleanResample
from phyai.timers import Profile
from phyai.types import Key, Prepared
from phyai.weights import collect_claims, update_tensors
from tests.conftest import GOLDEN

ROOT = GOLDEN / "minicpm"
SMALL = HeadSizes(
    width=48,
    num_layers=5,
    num_attention_heads=3,
    attention_head_dim=16,
    cross_attention_dim=40,
    ff_dim=96,
    output_dim=56,
    hidden_size=44,
    action_dim=9,
    state_dim=7,
    action_horizon=5,
    num_target_vision_tokens=3,
    max_seq_len=8,
    max_num_embodiments=4,
)
"""Unlike the golden head in every size; its last block attends to the prefix."""


def placement(dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(KernelTable(), torch.device("cpu"), dtype)


def fill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a module its tensors, all of them and no others."""
    names = {key for claim in collect_claims(module) for key in claim.keys}
    assert names == set(tensors)
    update_tensors(module, tensors)


def random_tensors(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return checkpoint tensors for every claim of a module; norms near one, no bias zero."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for claim in collect_claims(module):
        name, shape = claim.keys[0], claim.shape
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 1
        if len(shape) == 3:  # a bank: [embodiments, in, out]
            fan_in = shape[1]
        values = torch.randn(shape, generator=random)
        if "norm" in name and name.endswith("weight") and len(shape) == 1:
            found[name] = 1 + 0.1 * values
        else:
            found[name] = values * (fan_in**-0.5 if len(shape) > 1 else 0.2)
    return found


# ---------------------------------------------------------------- golden


def golden_config(root: Path = ROOT) -> MiniCPMRobotConfig:
    """Return the sizes of the golden checkpoint, as its config.json names them."""
    data = json.loads((root / "config.json").read_text(encoding="utf-8"))
    vision, head = data["vision_config"], data["action_head_cfg"]
    dit = head["diffusion_model_cfg"]
    heads, dim = dit["num_attention_heads"], dit["attention_head_dim"]
    return MiniCPMRobotConfig(
        vision=VisionSizes(**{name: vision[name] for name in VisionSizes.__slots__}),
        text=TextSizes(hidden_size=dit["cross_attention_dim"]),
        head=HeadSizes(
            width=heads * dim,
            num_layers=dit["num_layers"],
            num_attention_heads=heads,
            attention_head_dim=dim,
            cross_attention_dim=dit["cross_attention_dim"],
            ff_dim=4 * heads * dim,
            output_dim=dit["output_dim"],
            hidden_size=head["hidden_size"],
            action_dim=head["action_dim"],
            state_dim=head["state_dim"],
            action_horizon=head["action_horizon"],
            num_target_vision_tokens=head["num_target_vision_tokens"],
            max_seq_len=head["max_seq_len"],
            max_num_embodiments=head["max_num_embodiments"],
        ),
        downsample_mode=data["downsample_mode"],
    )


def golden_tensors(prefixes: tuple[str, ...], root: Path = ROOT) -> dict[str, Tensor]:
    tensors = load_file(root / "model.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith(prefixes)}


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Row:
    """One row's inputs: features [n, cross_attention_dim], state, noise [H, A], embodiment."""

    features: Tensor
    state: Tensor
    noise: Tensor
    embodiment: int


def random_rows(
    config: HeadSizes, lens: Sequence[int], embodiments: Sequence[int] | None = None, seed: int = 0
) -> list[Row]:
    random = torch.Generator().manual_seed(seed)
    shape = (config.action_horizon, config.action_dim)
    chosen = embodiments or [i % config.max_num_embodiments for i in range(len(lens))]
    return [
        Row(
            torch.randn(n, config.cross_attention_dim, generator=random),
            torch.randn(config.state_dim, generator=random),
            torch.randn(shape, generator=random),
            embodiment,
        )
        for n, embodiment in zip(lens, chosen, strict=True)
    ]


class HeadRunner:
    """A denoiser, its caches and the solver, as the runner puts them together."""

    def __init__(
        self,
        config: HeadSizes,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config, self.profile = config, Profile()
        self.network = MiniCPMDenoiser(config, placement(dtype), self.profile)
        self.tensors = random_tensors(self.network) if tensors is None else dict(tensors)
        fill(self.network, self.tensors)
        self.solver = CleanResample()

    def __call__(
        self, rows: Sequence[Row], steps: int = 4, *, static: tuple[int, int] | None = None
    ) -> Tensor:
        """Return the actions of rows; static: rows and tokens per row of a bucket."""
        with torch.no_grad(), self.loaded(rows, steps, static) as cache:
            grid = self.solver.grid(cache.key)
            self.network.prepare_grid(grid)
            x = {"action": cache.inputs["noise.action"].clone()}
            out = self.solver.solve(self.network, x, cache, grid)["action"]
        return out[: len(rows)]

    @contextmanager
    def loaded(
        self, rows: Sequence[Row], steps: int, static: tuple[int, int] | None
    ) -> Iterator[Cache]:
        """Yield a cache that ``encode`` has filled."""
        lens = [len(row.features) for row in rows]
        capacity, tokens = static or (len(rows), max(lens))
        key = Key(num_steps=steps, buckets=(("tokens", tokens),))
        batch = Prepared(
            {
                "state": torch.stack([row.state for row in rows]),
                "embodiment": torch.tensor([row.embodiment for row in rows]),
                "noise.action": torch.stack([row.noise for row in rows]),
            },
            len(rows),
            key,
        )
        buffers, arena = self.network.cache_buffers(tokens), Arena("cpu")
        cache = Cache("cache1", key, capacity, buffers, arena, torch.device("cpu"))
        cache.load(batch)
        features = [row.features for row in rows]
        if static:
            missing = capacity - len(rows)
            lens, features = lens + [lens[0]] * missing, features + [features[0]] * missing
        packed = torch.cat(features)
        if static and len(packed) < capacity * tokens:
            junk = torch.full((capacity * tokens - len(packed), packed.shape[1]), 3e4)
            packed = torch.cat([packed, junk])
        cross = self.network.load_plan(cache, lens, static=static is not None)
        cache.plan = SimpleNamespace(cross=cross)
        self.network.encode(cache, packed)
        yield cache
        cache.close()


# ---------------------------------------------------------------- plain truth


class PlainHead:
    """The head of one row, straight from the formulas."""

    def __init__(self, config: HeadSizes, tensors: Mapping[str, Tensor]) -> None:
        self.config, self.w = (
            config,
            {n.removeprefix("action_head."): t for n, t in tensors.items()},
        )

    def actions(self, row: Row, steps: int) -> Tensor:
        clean = torch.zeros_like(row.noise)
        for k in range(steps, 0, -1):
            t = k / steps
            clean = self.predict(row, t * row.noise + (1 - t) * clean, min(int(1000 * t), 999))
        return clean

    def predict(self, row: Row, x: Tensor, td: int) -> Tensor:
        config, w = self.config, self.w
        width, horizon = config.width, config.action_horizon
        p = torch.cat([x, row.state.expand(horizon, -1)], dim=1)
        first, second, third = ("layer1", "layer2", "layer3") if config.shared_head else (
            "W1", "W2", "W3")  # fmt: skip
        h = self.bank(f"action_encoder.{first}", p, row.embodiment)
        half = width // 2
        f = torch.exp(-torch.arange(half, dtype=torch.float32) * (math.log(10000.0) / half))
        code = torch.cat([(td * f).sin(), (td * f).cos()]).expand(horizon, -1)
        h = self.bank(f"action_encoder.{second}", torch.cat([h, code], dim=1), row.embodiment)
        h = self.bank(f"action_encoder.{third}", functional.silu(h), row.embodiment)
        if config.add_pos_embed:
            h = h + w["position_embedding.weight"][:horizon]
        z = torch.cat([w["future_tokens.weight"], h])
        j = torch.exp(-torch.arange(128, dtype=torch.float32) * (math.log(10000.0) / 127))
        name = "model.timestep_encoder.timestep_embedder"
        emb = self.linear(f"{name}.linear_1", torch.cat([(td * j).cos(), (td * j).sin()]))
        emb = functional.silu(self.linear(f"{name}.linear_2", functional.silu(emb)))
        for i in range(config.num_layers):
            z = self.block(i, z, emb, row.features)
        shift, scale = self.linear("model.proj_out_1", emb).chunk(2)
        z = functional.layer_norm(z, (width,), eps=1e-6) * (1 + scale) + shift
        z = self.linear("model.proj_out_2", z)
        z = self.bank("action_decoder.layer1", z, row.embodiment).relu()
        return self.bank("action_decoder.layer2", z, row.embodiment)[-horizon:]

    def block(self, i: int, z: Tensor, emb: Tensor, features: Tensor) -> Tensor:
        config, name = self.config, f"model.transformer_blocks.{i}"
        scale, shift = self.linear(f"{name}.norm1.linear", emb).chunk(2)
        y = functional.layer_norm(z, (config.width,), eps=1e-5) * (1 + scale) + shift
        source = y if i % 2 else features
        q, k, v = (
            self.linear(f"{name}.attn1.to_{leg}", x)
            .view(len(x), config.num_attention_heads, -1)
            .transpose(0, 1)
            for leg, x in (("q", y), ("k", source), ("v", source))
        )
        scores = q @ k.transpose(1, 2) * config.attention_head_dim**-0.5
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        z = z + self.linear(f"{name}.attn1.to_out.0", mixed)
        y = functional.layer_norm(z, (config.width,), eps=1e-5)
        y = functional.gelu(self.linear(f"{name}.ff.net.0.proj", y), approximate="tanh")
        return z + self.linear(f"{name}.ff.net.2", y)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def bank(self, name: str, x: Tensor, embodiment: int) -> Tensor:
        if self.config.shared_head:
            return self.linear(name, x)
        return x @ self.w[f"{name}.W"][embodiment] + self.w[f"{name}.b"][embodiment]
