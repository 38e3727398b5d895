"""DINOv3's vision transformer: the patch features of square images.

Patches are rotated by where they lie; the class token and the registers are not, and nobody
outside takes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from phyai.errors import ConfigError
from phyai.layers import Linear, Placement
from phyai.models.minicpm.weights import PatchWeight
from phyai.weights import Loader, claim

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}
"""``hidden_act`` of a config file -> op."""
_GATED = {"gelu_tanh": "gelu_tanh_mul", "silu": "silu_mul"}


@dataclass(frozen=True, slots=True)
class DinoConfig:
    """Sizes of a DinoTower. Names and defaults are those of ``config.json``.

    Files leave out what equals the default, so the defaults are the file format's and not those
    of one checkpoint.

    >>> DinoConfig(num_register_tokens=4).prefix_tokens
    5
    """

    hidden_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    patch_size: int = 16
    num_register_tokens: int = 0
    num_channels: int = 3
    layer_norm_eps: float = 1e-5
    rope_theta: float = 100.0
    hidden_act: str = "gelu"
    use_gated_mlp: bool = False
    query_bias: bool = True
    key_bias: bool = False
    value_bias: bool = True
    proj_bias: bool = True
    mlp_bias: bool = True

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads or self.head_dim % 4:
            raise ConfigError(
                "DINOv3 hidden_size must be num_attention_heads times a multiple of 4; got "
                f"{self.hidden_size} and {self.num_attention_heads}. Correct config.json."
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"DINOv3 hidden_act must be one of {', '.join(sorted(ACTIVATIONS))}; got "
                f"{self.hidden_act!r}. Other activations are not supported."
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def prefix_tokens(self) -> int:
        """Return how many tokens stand before the patches: the class token and the registers."""
        return 1 + self.num_register_tokens

    def grid_side(self, image_size: int) -> int:
        """Return how many patches fit one side of an image; a rest of it is not looked at."""
        return image_size // self.patch_size


class Stream(NamedTuple):
    """Activations x [F, T, W] and what is still to be added to them: gate * y.

    The sum is made together with the norm that reads it.
    """

    x: Tensor
    y: Tensor | None = None
    gate: Tensor | None = None


@dataclass(frozen=True)
class LessOne(Loader):
    """A norm's weight as its distance from one, the form the kernels of scaled norms take."""

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.float() - 1.0)


@dataclass(frozen=True)
class SomeLegs(Loader):
    """Biases of some of the layers fused into one: leg i fills ``width`` entries from starts[i]."""

    width: int
    starts: tuple[int, ...]

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (self.width,)

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.narrow(0, self.starts[shard_id or 0], self.width).copy_(tensor)

    def problem(self, param: Tensor, num_keys: int) -> str | None:
        fits = num_keys == len(self.starts)
        return None if fits else f"takes one key per start; got {num_keys} keys"


class ResidualNorm(nn.Module):
    """s = x + gate * y and n = LN(s) in one pass; statistics and weights float32."""

    def __init__(self, name: str, config: DinoConfig, at: Placement) -> None:
        super().__init__()
        width, wide = config.hidden_size, at.with_dtype(torch.float32)
        self.eps = config.layer_norm_eps
        self.scale = claim(wide.parameter(width), f"{name}.weight", loader=LessOne())
        self.shift = claim(wide.parameter(width), f"{name}.bias")
        self._norm = at.select("ada_layer_norm", width=width)
        self._add_norm = at.select("gated_ada_layer_norm", width=width)

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """Return s and n [F, T, W]."""
        x, y, gate = stream
        if y is None:
            return x, self._norm(x, self.scale, self.shift, self.eps)
        out: tuple[Tensor, Tensor] = self._add_norm(x, y, gate, self.scale, self.shift, self.eps)
        return out


class DinoMLP(nn.Module):
    """down(act(up(x))), or down(act(gate(x)) * up(x)) of gated configs. Shapes: x [..., W]."""

    def __init__(self, name: str, config: DinoConfig, at: Placement) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        act = ACTIVATIONS[config.hidden_act]
        self._act: Callable[[Tensor], Tensor] | None = None
        if not config.use_gated_mlp:
            self.up = Linear(f"{name}.up_proj", width, inner, at, bias=bias, epilogue=act)
        else:
            legs = [f"{name}.gate_proj", f"{name}.up_proj"]
            joined = _GATED.get(act, "none")
            self.up = Linear(legs, width, [inner] * 2, at, bias=bias, epilogue=joined)
            if joined == "none":
                self._act = at.select(act)
        self.down = Linear(f"{name}.down_proj", inner, width, at, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self._act is not None:
            gate, up = h.chunk(2, dim=-1)
            h = self._act(gate) * up
        out: Tensor = self.down(h)
        return out


class DinoBlock(nn.Module):
    """x += g1 * out(Attn(LN1(x))); x += g2 * MLP(LN2(x)); no mask.

    tokens: how many there are per image.
    """

    def __init__(self, name: str, config: DinoConfig, tokens: int, at: Placement) -> None:
        super().__init__()
        width, wide = config.hidden_size, at.with_dtype(torch.float32)
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.norm1 = ResidualNorm(f"{name}.norm1", config, at)
        self.qkv = _fused_qkv(f"{name}.attention", config, at)
        self.out = Linear(f"{name}.attention.o_proj", width, width, at, bias=config.proj_bias)
        self.gate1 = claim(wide.parameter(width), f"{name}.layer_scale1.lambda1")
        self.norm2 = ResidualNorm(f"{name}.norm2", config, at)
        self.mlp = DinoMLP(f"{name}.mlp", config, at)
        self.gate2 = claim(wide.parameter(width), f"{name}.layer_scale2.lambda1")
        self._rope = at.select("apply_rope_fp32", head_dim=self.head_dim)
        self._attention = at.select(
            "attention",
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.heads,
            queries=tokens,
            keys=tokens,
            masked=False,
        )

    def forward(self, stream: Stream, cos: Tensor, sin: Tensor, *, dropped: int = 0) -> Stream:
        """Return the new activations, without the first ``dropped`` tokens.

        Those are still looked at by the others. Shapes: cos, sin [F, T, head_dim].
        """
        x, n = self.norm1(stream)
        frames, tokens, _ = x.shape
        heads = self.qkv(n).view(frames, tokens, 3 * self.heads, self.head_dim)
        turned = self._rope(heads[:, :, : 2 * self.heads], cos, sin)
        q, k = turned.split(self.heads, dim=2)
        if dropped:
            x, q = x[:, dropped:], q[:, dropped:]
        mixed = self._attention(q, k, heads[:, :, 2 * self.heads :], self.head_dim**-0.5)
        x, n = self.norm2(Stream(x, self.out(mixed.flatten(2)), self.gate1))
        return Stream(x, self.mlp(n), self.gate2)


class DinoTower(nn.Module):
    """Images [F, C, S, S] float32 -> features of their patches [F, (S // patch)^2, width].

    image_size: S, settled here because the rotations are made once.
    The patch projection, rotations and norm statistics are float32 in every precision. Gives what
    the official model calls ``last_hidden_state``, from the first patch on.

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> config = DinoConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    >>> DinoTower("dino", config, 48, at)(torch.zeros(2, 3, 48, 48)).shape
    torch.Size([2, 9, 16])
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, name: str, config: DinoConfig, image_size: int, at: Placement) -> None:
        super().__init__()
        self.config, self.dtype, self.side = config, at.dtype, config.grid_side(image_size)
        if self.side < 1:
            raise ConfigError(
                f"image_size must be at least DINOv3's patch_size {config.patch_size}; got "
                f"{image_size}. Use towers that fit each other."
            )
        width, wide = config.hidden_size, at.with_dtype(torch.float32)
        table, kernel = f"{name}.embeddings", (config.num_channels, *[config.patch_size] * 2)
        self.patch = Linear(
            f"{table}.patch_embeddings",
            math.prod(kernel),
            width,
            wide,
            bias=True,
            loader=PatchWeight(kernel),
        )
        self.class_token = claim(wide.parameter(1, 1, width), f"{table}.cls_token")
        registers = config.num_register_tokens
        self.registers = claim(
            wide.parameter(1, registers, width), f"{table}.register_tokens", optional=not registers
        )
        tokens = config.prefix_tokens + self.side**2
        self.blocks = nn.ModuleList(
            DinoBlock(f"{name}.layer.{i}", config, tokens, at)
            for i in range(config.num_hidden_layers)
        )
        self.norm = ResidualNorm(f"{name}.norm", config, at)
        for label, turn in zip(("cos", "sin"), rotations(config, self.side), strict=True):
            self.register_buffer(label, turn[None].to(at.device), persistent=False)

    @property
    def num_patches(self) -> int:
        return self.side**2

    def forward(self, images: Tensor) -> Tensor:
        frames = images.shape[0]
        prefix = (self.class_token, self.registers)
        tokens = [part.expand(frames, -1, -1) for part in prefix]
        x = torch.cat((*tokens, self.patch(self._patches(images))), dim=1).to(self.dtype)
        cos, sin = (turn.expand(frames, -1, -1) for turn in (self.cos, self.sin))
        stream, last = Stream(x), len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            dropped = self.config.prefix_tokens if i == last else 0
            stream = block(stream, cos, sin, dropped=dropped)
        out: Tensor = self.norm(stream)[1]
        return out

    def _patches(self, images: Tensor) -> Tensor:
        """Return each patch's values [F, patches, C * p * p], in (channel, row, column) order."""
        frames, channels = images.shape[:2]
        side, patch = self.side, self.config.patch_size
        seen = images[:, :, : side * patch, : side * patch]
        cells = seen.reshape(frames, channels, side, patch, side, patch)
        return cells.permute(0, 2, 4, 1, 3, 5).reshape(frames, side**2, -1)


def rotations(config: DinoConfig, side: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin [prefix + side^2, head_dim] float32; tokens before the patches stay put.

    Half of the frequencies belong to a patch's row and half to its column, both measured from
    -1 to 1 across the image whatever its size.
    """
    dim = config.head_dim
    places = (torch.arange(side, dtype=torch.float32) + 0.5) / side * 2.0 - 1.0
    steps = torch.arange(dim // 4, dtype=torch.float32) * (4.0 / dim)
    turns = 2.0 * math.pi * places[:, None] / config.rope_theta**steps
    rows = turns[:, None].expand(side, side, -1)
    columns = turns[None].expand(side, side, -1)
    angles = torch.cat((rows, columns) * 2, dim=-1).reshape(side**2, dim)
    angles = torch.cat((angles.new_zeros(config.prefix_tokens, dim), angles))
    return angles.cos(), angles.sin()


def _fused_qkv(name: str, config: DinoConfig, at: Placement) -> Linear:
    """Return q, k and v of one input as one layer; legs without a bias have zeros there."""
    width = config.hidden_size
    legs = [f"{name}.{leg}_proj" for leg in "qkv"]
    has = (config.query_bias, config.key_bias, config.value_bias)
    qkv = Linear(legs, width, [width] * 3, at, bias=any(has))
    if qkv.bias is not None and not all(has):
        held = [i for i in range(3) if has[i]]
        qkv.bias.data.zero_()
        loader = SomeLegs(width, tuple(i * width for i in held))
        claim(qkv.bias, *(f"{legs[i]}.bias" for i in held), loader=loader)
    return qkv
