"""A pre-norm vision transformer over image patches, learned positions, no class token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.errors import ConfigError
from phyai.layers.linear import Linear
from phyai.layers.norm import LayerNorm
from phyai.layers.placement import Placement
from phyai.weights import claim


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a VisionTower; names as in Hugging Face vision configs.

    >>> VisionConfig(32, 2, 4, 64, patch_size=14, image_size=28).num_patches
    4
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    patch_size: int
    image_size: int
    num_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"vision hidden_size must be a multiple of num_attention_heads; got "
                f"{self.hidden_size} and {self.num_attention_heads}."
            )

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class VisionLayer(nn.Module):
    """x += Attn(LN1(x)); x += MLP(LN2(x)), tanh-approximated GELU, no mask.

    Shapes: x [N, patches, width] -> the same.

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> layer = VisionLayer("layers.0", VisionConfig(32, 2, 4, 64, 14, 28), at)
    >>> [t.shape for t in layer(torch.zeros(1, 4, 32))]
    [torch.Size([1, 4, 32]), torch.Size([1, 4, 32])]
    """

    def __init__(self, name: str, config: VisionConfig, at: Placement) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads, self.head_dim = (
            config.num_attention_heads,
            width // config.num_attention_heads,
        )
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        self.norm1 = LayerNorm(f"{name}.layer_norm1", width, config.layer_norm_eps, at)
        self.qkv = Linear(
            [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"],
            width,
            [width] * 3,
            at,
            bias=True,
        )
        self.out = Linear(f"{attn}.out_proj", width, width, at, bias=True)
        self.norm2 = LayerNorm(f"{name}.layer_norm2", width, config.layer_norm_eps, at)
        self.fc1 = Linear(
            f"{mlp}.fc1", width, config.intermediate_size, at, bias=True, epilogue="gelu_tanh"
        )
        self.fc2 = Linear(f"{mlp}.fc2", config.intermediate_size, width, at, bias=True)
        self._attention = at.select(
            "attention",
            head_dim=self.head_dim,
            heads=self.heads,
            kv_heads=self.heads,
            queries=config.num_patches,
            keys=config.num_patches,
            masked=False,
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the new x and what is still to be added to it.

        y: what is still to be added to x; each sum is made together with the norm that reads it.
        """
        batch, tokens, width = x.shape
        if y is None:
            n = self.norm1(x)
        else:
            x, n = self.norm1(x, y)
        heads = self.qkv(n).view(batch, tokens, 3, self.heads, self.head_dim)
        mixed = self._attention(*heads.unbind(2), self.head_dim**-0.5)
        x, n = self.norm2(x, self.out(mixed.reshape(batch, tokens, width)))
        return x, self.fc2(self.fc1(n))


class VisionTower(nn.Module):
    """Images [N, C, S, S] float32 in [-1, 1] -> patch features [N, (S/patch)^2, width].

    Patch convolution and position table stay float32 in every precision; activations are cast to
    the placement's dtype right after them.

    >>> from phyai.kernels import KernelTable
    >>> at = Placement(KernelTable(), torch.device("cpu"), torch.float32)
    >>> tower = VisionTower("vision", VisionConfig(32, 2, 4, 64, 14, 28), at)
    >>> tower(torch.zeros(1, 3, 28, 28)).shape
    torch.Size([1, 4, 32])
    """

    def __init__(self, name: str, config: VisionConfig, at: Placement) -> None:
        super().__init__()
        self.config, self.dtype = config, at.dtype
        width, patch, table = config.hidden_size, config.patch_size, f"{name}.embeddings"
        self.patch_weight = claim(
            at.parameter(width, config.num_channels, patch, patch, dtype=torch.float32),
            f"{table}.patch_embedding.weight",
        )
        self.patch_bias = claim(
            at.parameter(width, dtype=torch.float32), f"{table}.patch_embedding.bias"
        )
        self.positions = claim(
            at.parameter(config.num_patches, width, dtype=torch.float32),
            f"{table}.position_embedding.weight",
        )
        self.layers = nn.ModuleList(
            VisionLayer(f"{name}.encoder.layers.{i}", config, at)
            for i in range(config.num_hidden_layers)
        )
        self.norm = LayerNorm(f"{name}.post_layernorm", width, config.layer_norm_eps, at)

    def forward(self, images: Tensor) -> Tensor:
        patches = functional.conv2d(
            images, self.patch_weight, self.patch_bias, stride=self.config.patch_size
        )
        x = (patches.flatten(2).transpose(1, 2) + self.positions).to(self.dtype)
        y: Tensor | None = None
        for layer in self.layers:
            x, y = layer(x, y)
        out: Tensor = self.norm(x) if y is None else self.norm(x, y)[1]
        return out
