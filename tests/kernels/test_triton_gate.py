"""Gated products and matrix-product epilogues in Triton, against the reference."""

from __future__ import annotations

import pytest
import torch

from phyai.errors import ConfigError
from phyai.kernels import reference
from tests.kernels.triton_parity import DTYPES, chosen, close, draw, parity


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (2, 3, 34), (2, 2050)])
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_gated_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate_up = draw(*shape, dtype=dtype) * 3
    parity("gelu_tanh_mul", dtype, (gate_up,))
    parity("silu_mul", dtype, (gate_up,))
    parity("silu_mul", dtype, (gate_up[..., ::1][:1],))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_large_values_stay_finite() -> None:
    gate_up = torch.tensor([[-1e4, -90.0, 90.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for op in ("gelu_tanh_mul", "silu_mul"):
        got = chosen(op, torch.float32)(gate_up)
        assert torch.equal(got, getattr(reference, op)(gate_up))
        assert got[0, 0] == 0


def test_the_activation_is_rounded_before_the_product() -> None:
    gate_up = draw(8, 128, dtype=torch.float16)
    got = chosen("silu_mul", torch.float16)(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    once = (torch.nn.functional.silu(gate) * up).half()
    same = (got == reference.silu_mul(gate_up)).float().mean()
    assert same > 0.99
    assert (got == once).float().mean() < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_activation(dtype: torch.dtype) -> None:
    x = draw(2, 3, 37, dtype=dtype)
    parity("bias_gelu_tanh", dtype, (x[..., 2:35], draw(33, dtype=dtype, seed=1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_scales_of_an_integer_product(dtype: torch.dtype, with_rows: bool, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**20), 2**20, (2, 3, 33), generator=generator, dtype=torch.int32)
    scale, rows = draw(33).abs() * 1e-3, draw(2, 3, seed=1).abs() * 1e-3
    bias = draw(33, dtype=dtype, seed=2) if with_bias else None
    args = (x, scale, dtype, rows if with_rows else torch.full((2, 3), 1e-3), bias)
    parity("scale_bias", dtype, args)
    if not with_rows:
        weight_only = (draw(2, 33, dtype=dtype), scale, dtype, None, bias)
        got = chosen("scale_bias", dtype)(*weight_only)
        close(got, reference.scale_bias(*weight_only))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"two halves of one width; got \(2, 3\)"):
        chosen("silu_mul", torch.float32)(draw(2, 3))
    with pytest.raises(ConfigError, match="as wide as x"):
        chosen("bias_gelu_tanh", torch.float32)(draw(2, 3), draw(4))
    with pytest.raises(ConfigError, match="one value per row"):
        chosen("scale_bias", torch.float32)(draw(2, 3), draw(3), torch.float32, draw(3))
