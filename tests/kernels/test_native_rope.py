"""Rotary embedding and cache writes in C++ against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.native import rope
from tests.kernels.native_parity import (
    DTYPES,
    close,
    compiles,
    draw,
    falls_through,
    native,
    needs_native,
    parity,
    threads,
)

pytestmark = needs_native

# batch, tokens, heads, kv heads, head dim
SHAPES = ((1, 50, 8, 1, 256), (2, 7, 6, 3, 72), (1, 1, 1, 1, 2), (3, 17, 2, 2, 34), (2, 3, 4, 1, 8))


def fused(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one projection."""
    batch, tokens, heads, kv_heads, dim = shape
    all_heads = draw(batch, tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = all_heads.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
    return (
        q.unflatten(-1, (heads, dim)),
        k.unflatten(-1, (kv_heads, dim)),
        v.unflatten(-1, (kv_heads, dim)),
    )


def turn(batch: int, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Angles whose halves differ, so that a mix-up of the halves shows."""
    angles = draw(batch, tokens, dim, seed=7) * 3
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, tokens, _, _, dim = shape
    for x in fused(shape, dtype)[:2]:
        out = parity(rope.apply_rope, x, *turn(batch, tokens, dim, dtype))
        assert out.is_contiguous()
        parity(rope.apply_rope, x, *turn(1, tokens, dim, dtype))
        parity(rope.apply_rope, x, *turn(batch, tokens, dim, torch.float32))
    every_other = draw(batch, tokens, 3, 2 * dim, dtype=dtype)[..., ::2]
    parity(rope.apply_rope, every_other, *turn(batch, tokens, dim, dtype))


def caches(shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> tuple[Tensor, Tensor]:
    batch, tokens, _, kv_heads, dim = shape
    slots = batch * tokens + 5
    if kind == "dense":
        made = draw(2, slots, kv_heads, dim, dtype=dtype, seed=11)
    elif kind == "heads first":
        made = draw(2, kv_heads, slots, dim, dtype=dtype, seed=11).transpose(1, 2)
    else:
        made = draw(2, slots, kv_heads, dim + 6, dtype=dtype, seed=11)[..., :dim]
    return made[0], made[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["dense", "heads first", "part of each head"])
@pytest.mark.parametrize("shape", SHAPES)
def test_write(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    batch, tokens, _, _, dim = shape
    q, k, v = fused(shape, dtype)
    cos, sin = turn(batch, tokens, dim, dtype)
    slots = torch.randperm(batch * tokens + 5)[: batch * tokens]
    mine, theirs = caches(shape, dtype, kind), caches(shape, dtype, kind)
    before = [t.clone() for t in (q, k, v, cos, sin, slots)]
    want = reference.rope_kv_write(q, k, v, cos, sin, *theirs, slots)
    for count in (1, 2):
        with threads(count):
            got = native(rope.rope_kv_write, q, k, v, cos, sin, *mine, slots)
        close(got, want)
        for one, two in zip(mine, theirs, strict=True):
            close(one, two)
            one[slots] = 0  # the second turn writes again
    assert all(map(torch.equal, before, (q, k, v, cos, sin, slots)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.int8])
def test_plain_write(dtype: torch.dtype) -> None:
    values = (draw(9, 2, 24) * 9).to(dtype)
    slots = torch.tensor([3, 14, 0, 7, 8, 9, 1, 2, 11])
    wide = (draw(9, 2, 48) * 9).to(dtype)
    for new in (values, wide.flatten(1)[:, 24:72].unflatten(1, (2, 24))):
        mine, theirs = torch.zeros(2, 15, 2, 24, dtype=dtype)
        native(rope.kv_write, mine, slots, new)
        reference.kv_write(theirs, slots, new)
        assert torch.equal(mine, theirs)
    rows = torch.zeros(15, 3, 24, dtype=dtype)
    native(rope.kv_write, rows[:, 1:], slots, values)
    assert torch.equal(rows[slots, 1:], values)
    assert not rows[:, 0].any()


def test_a_slot_outside_the_cache_is_refused() -> None:
    q, k, v = fused((1, 2, 2, 1, 8), torch.float32)
    cos, sin = turn(1, 2, 8, torch.float32)
    for slot in (5, -1, 2**40):
        k_cache, v_cache = torch.zeros(2, 5, 1, 8)
        slots = torch.tensor([0, slot])
        with pytest.raises((IndexError, RuntimeError)):
            rope.rope_kv_write(q, k, v, cos, sin, k_cache, v_cache, slots)
        with pytest.raises((IndexError, RuntimeError)):
            rope.kv_write(v_cache, slots, v[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_pair(dtype: torch.dtype) -> None:
    x, (cos, sin) = draw(1, 2, 2, 34, dtype=dtype), turn(1, 2, 34, dtype)
    x[0, 1, 0, 3] = torch.nan
    out = native(rope.apply_rope, x, cos, sin)
    assert out.isnan().nonzero().tolist() == [[0, 1, 0, 3], [0, 1, 0, 20]]


def test_the_rest_goes_to_the_reference() -> None:
    x, (cos, sin) = draw(2, 3, 2, 8), turn(2, 3, 8, torch.float32)
    cases: tuple[tuple[Any, ...], ...] = (
        (x.double(), cos.double(), sin.double()),
        (x, cos[:, :1], sin[:, :1]),
        (x, cos[0], sin[0]),
        (x[:0], cos[:0], sin[:0]),
        (x[:, :0], cos[:, :0], sin[:, :0]),
    )
    for args in cases:
        falls_through(rope.apply_rope, *args)
    k_cache, v_cache = torch.zeros(2, 9, 2, 8)
    slots = torch.arange(6)
    every_other = slots.repeat_interleave(2)[::2]
    falls_through(rope.rope_kv_write, x, x, x, cos, sin, k_cache, v_cache, every_other)
    none = torch.zeros(0, 2, 8)
    rope.kv_write(k_cache, slots[:0], none)
    strided = draw(6, 8, 2).transpose(1, 2)
    rope.kv_write(v_cache, slots, strided)
    assert torch.equal(v_cache[:6], strided)


def test_compiled_callers_get_the_reference() -> None:
    compiles(rope.apply_rope, draw(2, 3, 2, 8), *turn(2, 3, 8, torch.float32))
