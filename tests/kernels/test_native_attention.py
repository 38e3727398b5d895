"""Attention in C++ against the reference: shapes, strides, masks, rounding points."""

from __future__ import annotations

import resource

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import reference
from phyai.kernels.cpu import sdpa_attention
from phyai.kernels.native.attention import attention
from tests.kernels.native_parity import (
    DTYPES,
    compiles,
    draw,
    falls_through,
    native,
    needs_native,
    parity,
)

pytestmark = needs_native

# rows, queries, heads, kv heads, head dim, keys
SHAPES = (
    (1, 1, 1, 1, 4, 1),
    (2, 3, 2, 1, 8, 5),
    (1, 17, 3, 3, 1, 33),
    (2, 50, 8, 1, 16, 37),  # many blocks of rows
    (1, 9, 8, 1, 256, 300),  # more keys than one pass over V
    (3, 33, 4, 4, 72, 64),
    (2, 5, 6, 2, 65, 263),
    (1, 2, 4, 2, 128, 1100),
    (1, 33, 16, 16, 80, 17),
)
# a score next to a tie may round the other way: then a probability is off by half a percent
ATOL = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


def qkv(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """k and v are the first keys of a longer cache."""
    rows, queries, heads, kv_heads, dim, keys = shape
    k, v = draw(2, rows, keys + 9, kv_heads, dim, dtype=dtype)[:, :, :keys]
    return draw(rows, queries, heads, dim, dtype=dtype), k, v


def agree(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    scale = q.shape[-1] ** -0.5
    args = (q, k, v, scale) if mask is None else (q, k, v, scale, mask)
    out: Tensor = parity(attention, *args, atol=ATOL[q.dtype])
    assert out.is_contiguous()
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    agree(*qkv(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, keys = shape[0], shape[-1]
    generator = torch.Generator().manual_seed(3)
    scattered = torch.rand(rows, keys, generator=generator) < 0.5
    lens = torch.tensor([keys - 1, 1, keys // 2])[:rows]
    padded = torch.arange(keys)[None] < lens[:, None]  # the first row of one key: nobody
    one = torch.zeros(rows, keys, dtype=torch.bool)
    one[:, keys // 2] = True
    everyone, nobody = torch.ones_like(one), torch.zeros_like(one)
    wide = torch.zeros(rows, 2 * keys + 1, dtype=torch.bool)
    wide[:, : 2 * keys : 2] = scattered
    for mask in (scattered, padded, one, everyone, nobody, wide[:, : 2 * keys : 2]):
        agree(*qkv(shape, dtype), mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_of_one_projection(dtype: torch.dtype) -> None:
    heads, kv_heads, dim = 4, 2, 24
    all_heads = draw(2, 11, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = (
        part.unflatten(-1, (-1, dim))
        for part in all_heads.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    )
    agree(q, k, v)
    heads_first = draw(2, 2, 19, dim, dtype=dtype).transpose(1, 2)
    agree(q, heads_first, heads_first)
    every_other = draw(2, 19, 2, 2 * dim, dtype=dtype)[..., ::2]
    agree(q, every_other, every_other)
    agree(draw(2, 11, 4, 2 * dim, dtype=dtype)[..., ::2], k, v)
    agree(q, k[:1].expand(2, -1, -1, -1), v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nobody_to_look_at_is_the_average(dtype: torch.dtype) -> None:
    q, k, v = qkv((2, 3, 2, 1, 16, 70), dtype)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[1, 3] = True
    out = agree(q, k, v, mask)
    average = v[0].float().mean(0).expand(3, 2, 16)
    torch.testing.assert_close(out[0].float(), average, rtol=1e-2, atol=2e-3)
    assert torch.equal(out[1], v[1, 3].expand(3, 2, 16))


def test_the_official_rounding_points() -> None:
    """The same sums without the roundings give clearly other bits: parity does see them."""
    q, k, v = qkv((1, 9, 8, 1, 256, 300), torch.bfloat16)
    want = reference.attention(q, k, v, 1 / 16)
    kept = (native(attention, q, k, v, 1 / 16) == want).double().mean()
    lost = (sdpa_attention(q, k, v, 1 / 16) == want).double().mean()
    assert kept > 0.98
    assert lost < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    q, k, v = qkv((1, 7, 2, 1, 64, 70), dtype)
    out = native(attention, q * 300, k * 300, v, 1.0)
    assert out.isfinite().all()
    torch.testing.assert_close(out, reference.attention(q * 300, k * 300, v, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_shows(dtype: torch.dtype) -> None:
    q, k, v = qkv((1, 9, 2, 1, 16, 21), dtype)
    broken = q.clone()
    broken[0, 4, 1, 15] = torch.nan
    out = agree_with_nan(broken, k, v)
    assert out.isnan().any(-1).nonzero().tolist() == [[0, 4, 1]]
    for bad in (torch.nan, torch.inf):
        keys, values = k.clone(), v.clone()
        keys[0, 20, 0, 3], values[0, 20, 0, 3] = torch.nan, bad
        assert agree_with_nan(q, keys, v).isnan().all()
        assert not agree_with_nan(q, k, values)[..., 3].isfinite().any()


def agree_with_nan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = native(attention, q, k, v, 0.25)
    want = reference.attention(q, k, v, 0.25)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2, equal_nan=True)
    return out


def test_keys_behind_the_last_visible_one_are_not_read() -> None:
    q, k, v = qkv((2, 5, 2, 1, 16, 40), torch.bfloat16)
    mask = torch.arange(40)[None] < torch.tensor([[13], [40]])
    want = native(attention, q, k, v, 0.25, mask)
    k[0, 13:], v[0, 13:] = torch.nan, torch.nan
    assert torch.equal(native(attention, q, k, v, 0.25, mask), want)


def test_nothing_to_do() -> None:
    for shape in ((0, 3, 2, 1, 8, 5), (1, 0, 2, 1, 8, 5)):
        q, k, v = qkv(shape, torch.float32)
        out = native(attention, q, k, v, 1.0)
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
    q, k, v = qkv((1, 3, 2, 1, 8, 5), torch.float32)
    falls_through(attention, q, k[:, :0], v[:, :0], 1.0)


def test_the_rest_goes_to_the_reference() -> None:
    q, k, v = qkv((2, 3, 2, 1, 8, 5), torch.float32)
    mask = torch.tensor([[True, True, False, True, False]])
    falls_through(attention, q, k, v, 1.0, mask)  # one mask for all rows
    falls_through(attention, q, k, v, 1.0, None, draw(1, 2, 3, 5))
    falls_through(attention, q.double(), k.double(), v.double(), 1.0)
    falls_through(attention, q, k, v[..., :6], 1.0)
    with pytest.raises(ConfigError, match="multiple of the key/value heads"):
        attention(*qkv((1, 3, 3, 2, 8, 5), torch.float32), 1.0)


def test_scratch_is_kept_not_grown() -> None:
    q, k, v = qkv((1, 50, 8, 1, 64, 600), torch.bfloat16)
    small = qkv((2, 3, 2, 1, 8, 5), torch.bfloat16)
    for _ in range(5):
        native(attention, q, k, v, 0.1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(30):
        native(attention, *small, 0.1)
        native(attention, q, k, v, 0.1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048  # KiB


def test_compiled_callers_get_the_reference() -> None:
    compiles(attention, *qkv((2, 3, 2, 1, 8, 5), torch.float32), 1.0)
