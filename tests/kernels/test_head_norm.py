"""Head norms with rotation, the wide rotation and the exact GELU: every row against the formula."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import reference
from phyai.kernels.native import rope
from tests.kernels import native_parity, triton_parity
from tests.kernels.native_parity import DTYPES, compiles, falls_through, needs_native
from tests.kernels.triton_parity import chosen, draw

SIZES = ((1, 1, 1, 2), (2, 2, 9, 6), (1, 3, 8, 72))


def inputs(rows: int, tokens: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """x as part of a wider projection, a weight, and angles whose halves differ."""
    x = draw(rows, tokens, heads + 3, dim, dtype=dtype)[:, :, 1:-2]
    angles = draw(rows, tokens, dim, seed=5) * 3
    return x, draw(dim, seed=9), angles.cos(), angles.sin()


@pytest.mark.parametrize("sizes", SIZES)
def test_norm_then_rotation(sizes: tuple[int, ...]) -> None:
    x, weight, cos, sin = inputs(*sizes, torch.float32)
    wide = x.double()
    n = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    half = sizes[-1] // 2
    swapped = torch.cat([-n[..., half:], n[..., :half]], dim=-1)
    want = n * cos.double()[:, :, None] + swapped * sin.double()[:, :, None]
    got = reference.rms_norm_rope(x, weight, cos, sin, 1e-6)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    turned = reference.apply_rope_fp32(x, cos, sin)
    assert torch.equal(turned, reference.apply_rope(x, cos, sin))


def test_the_wide_rotation_rounds_once() -> None:
    x, _, cos, sin = inputs(2, 9, 4, 64, torch.bfloat16)
    want = reference.apply_rope(x.double(), cos.double(), sin.double()).bfloat16()
    got = reference.apply_rope_fp32(x, cos, sin)
    assert got.dtype == torch.bfloat16
    assert (got == want).double().mean() > 0.999
    assert (reference.apply_rope(x, cos, sin) == want).double().mean() < 0.9


@pytest.mark.parametrize("dtype", triton_parity.DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_triton(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, cos, sin = inputs(*sizes, dtype)
    dim = sizes[-1]
    fused = chosen("rms_norm_rope", dtype, head_dim=dim)
    # the interpreter truncates to bfloat16, here at the norm and at each product
    factor = 4.0 if dtype == torch.bfloat16 else 2.0
    for turn in ((cos, sin), (cos[:1], sin[:1])):
        want = reference.rms_norm_rope(x, weight, *turn, 1e-6)
        triton_parity.close(fused(x, weight, *turn, 1e-6), want, factor)
    triton_parity.parity("apply_rope_fp32", dtype, (x, cos, sin), head_dim=dim)


def test_triton_keeps_the_rounding_points() -> None:
    x, weight, cos, sin = inputs(1, 4, 2, 32, torch.float16)
    fused = chosen("rms_norm_rope", torch.float16, head_dim=32)(x, weight, cos, sin, 1e-6)
    want = reference.rms_norm_rope(x, weight, cos, sin, 1e-6)
    assert (fused == want).double().mean() > 0.98
    wide = chosen("apply_rope_fp32", torch.float16, head_dim=32)(x, cos, sin)
    assert torch.equal(wide, reference.apply_rope_fp32(x, cos, sin))
    assert not torch.equal(wide, reference.apply_rope(x, cos, sin))


def test_triton_refuses_what_does_not_fit() -> None:
    x, weight, cos, sin = inputs(1, 2, 2, 4, torch.float32)
    fn = chosen("rms_norm_rope", torch.float32, head_dim=4)
    with pytest.raises(ConfigError, match="as wide as a head"):
        fn(x, weight[:2], cos, sin, 1e-6)
    with pytest.raises(ConfigError, match="must be even"):
        fn(x[..., :3], weight[:3], cos[..., :3], sin[..., :3], 1e-6)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_native(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, cos, sin = inputs(*sizes, dtype)
    native_parity.parity(rope.rms_norm_rope, x, weight, cos, sin, 1e-6)
    native_parity.parity(rope.apply_rope_fp32, x, cos, sin)


@needs_native
def test_the_rest_goes_to_the_reference() -> None:
    x, weight, cos, sin = inputs(2, 3, 2, 8, torch.float32)
    falls_through(rope.rms_norm_rope, x.half(), weight, cos, sin, 1e-6)
    falls_through(rope.apply_rope_fp32, x.half(), cos, sin)
    compiles(rope.rms_norm_rope, x, weight, cos, sin, 1e-6)
    compiles(rope.apply_rope_fp32, x, cos, sin)


@pytest.mark.parametrize("dtype", triton_parity.DTYPES)
def test_gelu_is_exact(dtype: torch.dtype) -> None:
    x = torch.linspace(-5, 5, 201).to(dtype)
    want = torch.tensor([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()])
    tol = triton_parity.TOLERANCE[dtype]
    got: Tensor = reference.gelu_erf(x)
    torch.testing.assert_close(got.float(), want, rtol=tol, atol=tol)
    wide = torch.linspace(-3, 3, 101)
    assert (reference.gelu_erf(wide) - reference.gelu_tanh(wide)).abs().max() > 1e-4
