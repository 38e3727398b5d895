"""Rotary embedding and cache writes in Triton, apart and fused, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import reference
from tests.kernels.triton_parity import DTYPES, chosen, close, draw, parity


def angles(rows: int, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    positions = torch.arange(tokens) + 5 * torch.arange(rows)[:, None]
    return reference.rope_cos_sin(positions, dim, 10000.0, dtype)


def split_qkv(
    rows: int, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views into the result of one projection."""
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    parts = draw(rows, tokens, sum(sizes), dtype=dtype).split(sizes, dim=-1)
    q, k, v = (part.view(rows, tokens, -1, dim) for part in parts)
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 2), (2, 2, 9, 3, 6), (1, 2, 8, 1, 72)])
def test_rope_and_fused_cache_write(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, tokens, heads, kv_heads, dim = sizes
    q, k, v = split_qkv(rows, tokens, heads, kv_heads, dim, dtype)
    cos, sin = angles(rows, tokens, dim, dtype)
    parity("apply_rope", dtype, (q, cos, sin), head_dim=dim)
    parity("apply_rope", dtype, (k, cos[:1], sin[:1].float()), head_dim=dim)

    slots = torch.randperm(rows * tokens + 3, generator=torch.Generator().manual_seed(0))
    slots = slots[: rows * tokens]
    caches = [draw(rows * tokens + 3, kv_heads, dim, dtype=dtype, seed=s) for s in (7, 8)]
    want = [cache.clone() for cache in caches]
    got_q = chosen("rope_kv_write", dtype, head_dim=dim)(q, k, v, cos, sin, *caches, slots)
    close(got_q, reference.rope_kv_write(q, k, v, cos, sin, *want, slots))
    for got, expected in zip(caches, want, strict=True):
        close(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write(dtype: torch.dtype) -> None:
    """Into a cache whose slots are part of a wider buffer; other slots and the rest stay."""
    buffer = draw(7, 2, 3, 10, dtype=dtype)
    want = buffer.clone()
    values = draw(2, 4, 3, 10, dtype=dtype, seed=1).transpose(0, 1)[..., 2:8][:, 1]
    slots = torch.tensor([6, 0, 3, 2])
    chosen("kv_write", dtype)(buffer[:, 1, :, :6], slots, values)
    want[slots, 1, :, :6] = values
    assert torch.equal(buffer, want)


def test_slots_outside_the_cache_are_not_written() -> None:
    buffer = torch.zeros(5, 1, 4)
    slots = torch.tensor([-1, 2, 3])
    chosen("kv_write", torch.float32)(buffer[1:4], slots, torch.ones(3, 1, 4))
    assert buffer.sum(dim=(1, 2)).tolist() == [0, 0, 0, 4, 0]
    q, cos = torch.ones(1, 3, 1, 4), torch.ones(1, 3, 4)
    buffer.zero_()
    fused = chosen("rope_kv_write", torch.float32, head_dim=4)
    fused(q, q, q, cos, cos * 0, buffer[1:4], buffer[1:4].clone(), slots)
    assert buffer.sum(dim=(1, 2)).tolist() == [0, 0, 0, 4, 0]


def test_products_are_rounded_before_the_sum() -> None:
    x = draw(1, 4, 2, 32, dtype=torch.float16)
    cos, sin = angles(1, 4, 32, torch.float32)
    got = chosen("apply_rope", torch.float16, head_dim=32)(x, cos, sin)
    assert torch.equal(got, reference.apply_rope(x, cos, sin))
    wide = reference.apply_rope(x.float(), cos.half().float(), sin.half().float()).half()
    assert not torch.equal(got, wide)


def test_what_does_not_fit_is_refused() -> None:
    q, k, cos = draw(1, 2, 2, 4), draw(1, 2, 1, 4), draw(1, 2, 4)
    cache, slots = draw(5, 1, 4), torch.tensor([0, 1])
    fused = chosen("rope_kv_write", torch.float32, head_dim=4)
    with pytest.raises(ConfigError, match="rows, tokens and head dim of q"):
        fused(q, draw(1, 3, 1, 4), k, cos, cos, cache, cache, slots)
    with pytest.raises(ConfigError, match=r"\[N, K, D\], \[M\] and \[M, K, D\]"):
        fused(q, k, k, cos, cos, cache, cache.half(), slots)
    with pytest.raises(ConfigError, match=r"\[N, K, D\], \[M\] and \[M, K, D\]"):
        chosen("kv_write", torch.float32)(cache, slots[:1], draw(2, 1, 4))
    with pytest.raises(ConfigError, match="must be even"):
        chosen("apply_rope", torch.float32, head_dim=3)(draw(1, 1, 1, 3), draw(1, 1, 3), cos)
