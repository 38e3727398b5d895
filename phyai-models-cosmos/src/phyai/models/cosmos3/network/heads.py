"""What turns each leaf of the solver variable into media tokens, and tokens into its velocity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from phyai.cache import Cache
from phyai.layers import Linear, Placement
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.network.layout import MediaLayout
from phyai.types import BufferSpec
from phyai.weights import Loader, claim


def patchify(x: Tensor, patch: int) -> Tensor:
    """Return patches [B, T * H * W, patch * patch * C] of a latent [B, C, T, h, w].

    Incomplete patches at the bottom and on the right are filled with zeros. Of the numbers of a
    patch its row runs slowest, then its column, then the channel.
    """
    rows, columns = -x.shape[3] % patch, -x.shape[4] % patch
    if rows or columns:
        x = functional.pad(x, (0, columns, 0, rows))
    batch, channels, frames, height, width = x.shape
    split = x.view(batch, channels, frames, height // patch, patch, width // patch, patch)
    return split.permute(0, 2, 3, 5, 4, 6, 1).reshape(batch, -1, patch * patch * channels)


def unpatchify(tokens: Tensor, shape: torch.Size, patch: int) -> Tensor:
    """Return the latent of ``shape`` [B, C, T, h, w] whose patches are ``tokens``."""
    batch, channels, frames, height, width = shape
    rows, columns = -(-height // patch), -(-width // patch)
    split = tokens.view(batch, frames, rows, columns, patch, patch, channels)
    joined = split.permute(0, 6, 1, 2, 4, 3, 5)
    whole = joined.reshape(batch, channels, frames, rows * patch, columns * patch)
    return whole[..., :height, :width]


class VideoHead(nn.Module):
    """Leaf ``video`` [B, C, T, h, w]: a token per patch."""

    def __init__(self, config: Cosmos3Config, at: Placement) -> None:
        super().__init__()
        self.patch, self.dtype = config.latent_patch_size, at.dtype
        values, width = config.patch_values, config.hidden_size
        self.proj_in = Linear("proj_in", values, width, at, bias=True)
        self.proj_out = Linear("proj_out", width, values, at, bias=True)

    def cache_buffers(self) -> Mapping[str, BufferSpec]:
        return {}

    def encode(self, cache: Cache) -> None:
        return None

    def embed(self, x: Tensor, cache: Cache) -> Tensor:
        out: Tensor = self.proj_in(patchify(x, self.patch).to(self.dtype))
        return out

    def velocity(self, g: Tensor, x: Tensor, cache: Cache) -> Tensor:
        return unpatchify(self.proj_out(g).float(), x.shape, self.patch)

    def clean(self, mask: Tensor, layout: MediaLayout) -> Tensor:
        """Return which tokens are of frames known as a whole, [B, tokens] bool."""
        _, rows, columns = layout.grid
        return mask.all(dim=4).all(dim=3).all(dim=1).repeat_interleave(rows * columns, dim=1)


@dataclass(frozen=True)
class Unflattened(Loader):
    """A table with one row per domain, seen as a parameter of more dims."""

    def shape(self, param: Tensor, shard_id: int | None) -> tuple[int, ...]:
        return (param.shape[0], prod(param.shape[1:]))

    def copy(self, param: Tensor, tensor: Tensor, shard_id: int | None) -> None:
        param.copy_(tensor.reshape(param.shape))


class DomainLinear(nn.Module):
    """y_i = x_i W[e_i] + b[e_i] for row i of domain e_i; the rows' W and b lie in the cache.

    ``<name>.fc.weight`` [domains, in * out], in slowest; ``<name>.bias.weight`` [domains, out].
    Which domain a row has is data: a batch may mix them, and one graph serves all.
    """

    def __init__(
        self, name: str, domains: int, in_features: int, out_features: int, at: Placement
    ) -> None:
        super().__init__()
        self.name, self.dtype = name, at.dtype
        self.weight = claim(
            at.parameter(domains, in_features, out_features),
            f"{name}.fc.weight",
            loader=Unflattened(),
        )
        self.bias = claim(at.parameter(domains, out_features), f"{name}.bias.weight")

    def cache_buffers(self) -> Mapping[str, BufferSpec]:
        _, inputs, outputs = self.weight.shape
        return {
            f"{self.name}.w": BufferSpec((inputs, outputs), self.dtype),
            f"{self.name}.b": BufferSpec((1, outputs), self.dtype),
        }

    def gather(self, cache: Cache, domain: Tensor) -> None:
        """Fill the buffers; domain int64 [B]."""
        torch.index_select(self.weight, 0, domain, out=cache[f"{self.name}.w"])
        torch.index_select(self.bias[:, None], 0, domain, out=cache[f"{self.name}.b"])

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        return torch.baddbmm(cache[f"{self.name}.b"], x, cache[f"{self.name}.w"])


class ActionHead(nn.Module):
    """Leaf ``action`` [B, L, A]: a token per row, by the row's domain (input ``domain``)."""

    def __init__(self, config: Cosmos3Config, at: Placement) -> None:
        super().__init__()
        self.dtype = at.dtype
        many, values, width = config.num_embodiment_domains, config.action_dim, config.hidden_size
        self.proj_in = DomainLinear("action_proj_in", many, values, width, at)
        self.proj_out = DomainLinear("action_proj_out", many, width, values, at)
        self.mark = claim(at.parameter(width), "action_modality_embed")

    def cache_buffers(self) -> Mapping[str, BufferSpec]:
        return {**self.proj_in.cache_buffers(), **self.proj_out.cache_buffers()}

    def encode(self, cache: Cache) -> None:
        domain = cache.inputs["domain"]
        self.proj_in.gather(cache, domain)
        self.proj_out.gather(cache, domain)

    def embed(self, x: Tensor, cache: Cache) -> Tensor:
        out: Tensor = self.proj_in(x.to(self.dtype), cache) + self.mark
        return out

    def velocity(self, g: Tensor, x: Tensor, cache: Cache) -> Tensor:
        out: Tensor = self.proj_out(g, cache).float()
        return out

    def clean(self, mask: Tensor, layout: MediaLayout) -> Tensor:
        """Return which rows are known as a whole, [B, L] bool; unused channels always are."""
        return mask.all(dim=2)


class SoundHead(nn.Module):
    """Leaf ``sound`` [B, C, T_s]: a token per frame."""

    def __init__(self, config: Cosmos3Config, at: Placement) -> None:
        super().__init__()
        self.dtype = at.dtype
        values, width = config.sound_dim, config.hidden_size
        self.proj_in = Linear("audio_proj_in", values, width, at, bias=True)
        self.proj_out = Linear("audio_proj_out", width, values, at, bias=True)
        self.mark = claim(at.parameter(width), "audio_modality_embed")

    def cache_buffers(self) -> Mapping[str, BufferSpec]:
        return {}

    def encode(self, cache: Cache) -> None:
        return None

    def embed(self, x: Tensor, cache: Cache) -> Tensor:
        out: Tensor = self.proj_in(x.transpose(1, 2).to(self.dtype)) + self.mark
        return out

    def velocity(self, g: Tensor, x: Tensor, cache: Cache) -> Tensor:
        out: Tensor = self.proj_out(g).float().transpose(1, 2)
        return out

    def clean(self, mask: Tensor, layout: MediaLayout) -> Tensor:
        return mask.all(dim=1)


Head = VideoHead | ActionHead | SoundHead
