"""Norms, gated sums and activations in C++ against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.kernels.native import elementwise, norm
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

EPS = 1e-6
WIDTHS = (1, 3, 17, 33, 64, 1024)
ADAPTIVE = ("ada_rms_norm", "ada_layer_norm")
GATED = ("gated_ada_rms_norm", "gated_ada_layer_norm")
TAIL = 5e-6  # gelu of some -5 is x times what is left of 1 - 1: both sides round that their way
ACTIVATIONS = (elementwise.gelu_tanh_mul, elementwise.silu_mul)


def xy(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)


def weights(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return draw(width, dtype=dtype, seed=2), draw(width, dtype=dtype, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_weighted(width: int, dtype: torch.dtype) -> None:
    (x, y), (w, b) = xy(2, 17, width, dtype=dtype), weights(width)
    for offset in (0.0, 1.0):
        parity(norm.rms_norm, x, w, EPS, offset)
        parity(norm.add_rms_norm, x, y, w, EPS, offset)
    parity(norm.layer_norm, x, w, b, EPS)
    parity(norm.add_layer_norm, x, y, w, b, EPS)
    rounded = weights(width, torch.bfloat16)
    parity(norm.layer_norm, x, *rounded, EPS)
    parity(norm.add_layer_norm, x, y, *rounded, EPS)


def modulations(kind: str, batch: int, tokens: int, width: int) -> list[Tensor]:
    """gate, scale, shift as the models keep them: parts of one table."""
    shape = {
        "W": (width,),
        "11W": (1, 1, width),
        "B1W": (batch, 1, width),
        "1TW": (1, tokens, width),
        "BTW": (batch, tokens, width),
    }[kind]
    return list(draw(3, *shape, seed=4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["W", "11W", "B1W", "1TW", "BTW"])
def test_modulated(kind: str, dtype: torch.dtype) -> None:
    for width in (5, 33, 512):
        x, y = xy(2, 19, width, dtype=dtype)
        gate, scale, shift = modulations(kind, 2, 19, width)
        for name in ADAPTIVE:
            parity(getattr(norm, name), x, scale, shift, EPS)
        for name in GATED:
            parity(getattr(norm, name), x, y, gate, scale, shift, EPS)
        parity(norm.gated_residual, x, y, gate)
        parity(norm.gated_residual, x, y, gate.bfloat16())


def test_each_modulation_has_its_own_shape() -> None:
    x, y = xy(3, 7, 24, dtype=torch.bfloat16)
    gate, scale = draw(3, 1, 24), draw(24, seed=8)
    shift = draw(3, 7, 48, seed=9)[..., :24]
    parity(norm.gated_ada_rms_norm, x, y, gate, scale, shift, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype: torch.dtype) -> None:
    w, b = weights(40)
    long = draw(2, 6, 100, dtype=dtype)
    views = {
        "part of each row": long[:, :, 7:47],
        "fewer tokens": draw(2, 9, 40, dtype=dtype)[:, :6],
        "one row repeated": draw(1, 1, 40, dtype=dtype).expand(2, 6, 40),
        "transposed": draw(40, 6, 2, dtype=dtype).permute(2, 1, 0),
        "every other entry": draw(2, 6, 80, dtype=dtype)[..., ::2],
    }
    for x in views.values():
        y = draw(2, 6, 40, dtype=dtype, seed=5)
        parity(norm.layer_norm, x, w, b, EPS)
        for first, second in ((x, y), (y, x), (x, x)):
            total, out = parity(norm.gated_ada_rms_norm, first, second, w, w, b, EPS)
            assert total.is_contiguous()
            assert out.is_contiguous()
        parity(elementwise.silu_mul, x)
        parity(elementwise.bias_gelu_tanh, x, b)
    parity(norm.rms_norm, long[0, :, :40], w, EPS)
    parity(norm.rms_norm, long[0, 0, :40].clone(), w, EPS)
    parity(
        norm.add_rms_norm, draw(2, 3, 2, 40, dtype=dtype), draw(2, 3, 2, 40, dtype=dtype), w, EPS
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_activations(width: int, dtype: torch.dtype) -> None:
    x = draw(2, 9, 2 * width, dtype=dtype) * 3
    for op in ACTIVATIONS:
        parity(op, x, atol=TAIL)
    for bias_dtype in DTYPES:
        parity(elementwise.bias_gelu_tanh, x, draw(2 * width, dtype=bias_dtype), atol=TAIL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_over_the_whole_range(dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 20001), torch.linspace(-1, 1, 20001)))
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3e38, 0.0, 1e-30])
    gate = torch.cat((gate, ends)).to(dtype)
    for op in ACTIVATIONS:
        parity(op, torch.cat((gate, torch.ones_like(gate)))[None])
    parity(elementwise.bias_gelu_tanh, gate[None], torch.zeros(gate.shape[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_stays_visible(bad: float, dtype: torch.dtype) -> None:
    (x, y), (w, b) = xy(1, 4, 37, dtype=dtype), weights(37)
    for column in (0, 35):  # in a whole vector, and in what is left of the row
        broken = x.clone()
        broken[0, 2, column] = bad
        for first, second in ((broken, y), (y, broken)):
            for op in (norm.gated_ada_rms_norm, norm.gated_ada_layer_norm):
                total, out = native(op, first, second, w, w, b, EPS)
                assert not total[0, 2, column].isfinite()
                assert out[0, 2].isnan().any()
                assert out[0, [0, 1, 3]].isfinite().all()
        gelu = native(elementwise.bias_gelu_tanh, broken, b)
        assert not gelu[0, 2, column].isfinite()
        assert gelu.isfinite().sum() == gelu.numel() - 1


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    x, w = torch.zeros(shape), torch.ones(shape[-1])
    falls_through(norm.add_rms_norm, x, x, w, EPS)
    falls_through(norm.gated_residual, x, x, w)
    falls_through(elementwise.silu_mul, x)
    falls_through(elementwise.bias_gelu_tanh, x, w)


def test_the_rest_goes_to_the_reference() -> None:
    x, y = xy(2, 3, 8, dtype=torch.float32)
    w, b = weights(8)
    cases: tuple[tuple[Any, ...], ...] = (
        (norm.rms_norm, x.double(), w, EPS),
        (norm.rms_norm, x, w.double(), EPS),
        (norm.rms_norm, x, draw(16)[::2], EPS),
        (norm.layer_norm, x, w, b.bfloat16(), EPS),
        (norm.ada_rms_norm, x, draw(1), b, EPS),
        (norm.ada_rms_norm, x, draw(3, 8), b, EPS),
        (norm.ada_rms_norm, x, draw(2, 3, 1), b, EPS),
        (norm.gated_residual, x, y, torch.tensor(0.5)),
        (norm.gated_residual, x, y, w.half()),
        (norm.gated_residual, x, y[:1], w),
        (norm.gated_residual, x, y.bfloat16(), w),
        (norm.add_rms_norm, x, y[:, :1], w, EPS),
        (elementwise.silu_mul, x.half()),
        (elementwise.bias_gelu_tanh, x, w.double()),
    )
    for op, *args in cases:
        falls_through(op, *args)


def test_wrong_shapes_are_refused() -> None:
    x, w = draw(2, 3, 8), draw(8)
    with pytest.raises(RuntimeError):
        norm.rms_norm(x, draw(7), EPS)
    with pytest.raises(RuntimeError):
        norm.gated_ada_rms_norm(x, draw(2, 4, 8), w, w, w, EPS)
    with pytest.raises(RuntimeError):
        norm.gated_residual(x, x, draw(2, 2, 8))


def test_compiled_callers_get_the_reference() -> None:
    x, y = xy(2, 3, 8, dtype=torch.bfloat16)
    w, b = weights(8)
    compiles(norm.gated_ada_rms_norm, x, y, w, w, b, EPS)
    compiles(norm.gated_residual, x, y, w)
    compiles(elementwise.silu_mul, x)
