"""RMSNorm, LayerNorm and modulated norms in Triton, chosen by dispatch, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import KernelTable, reference
from tests.kernels.triton_parity import DTYPES, chosen, draw, parity

SHAPES = ((1, 1, 2), (2, 3, 17), (3, 5, 300))


def strided(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A slice of a wider tensor: rows do not follow each other."""
    return draw(*shape[:-1], shape[-1] + 7, dtype=dtype, seed=seed)[..., 3:-4]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_with_weights(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y, width = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype, seed=1), shape[-1]
    w, b = draw(width, seed=2), draw(width, dtype=dtype, seed=3)
    parity("rms_norm", dtype, (x, w, 1e-6), width=width)
    parity("rms_norm", dtype, (x[0, 0], w, 1e-6, 0.0), width=width)
    parity("add_rms_norm", dtype, (x, y, w, 1e-6, 0.0), width=width)
    parity("layer_norm", dtype, (x, w, b, 1e-6), width=width)
    parity("layer_norm", dtype, (x[0], b, b, 1e-6), width=width)
    parity("add_layer_norm", dtype, (x, y, w, b, 1e-6), width=width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("modulation", ["shared", "row", "token"])
def test_modulated_norms(dtype: torch.dtype, modulation: str) -> None:
    shape, width = (2, 3, 17), 17
    small = {"shared": (width,), "row": (2, 1, width), "token": shape}[modulation]
    x, y = strided(*shape, dtype=dtype), strided(*shape, dtype=dtype, seed=1)
    # one of three interleaved tables, as a fused projection leaves them
    scale, shift, gate = draw(*small[:-1], 3 * width, seed=4).chunk(3, dim=-1)
    for kind in ("rms", "layer"):
        parity(f"ada_{kind}_norm", dtype, (x, scale, shift, 1e-6), width=width)
        fused = (x, y, gate, scale, shift, 1e-6)
        parity(f"gated_ada_{kind}_norm", dtype, fused, width=width)
    parity("gated_residual", dtype, (x, y, gate))
    parity("gated_residual", dtype, (x[0], y[0], gate if gate.dim() == 1 else gate[0]))


def test_the_gate_may_be_one_number_per_row() -> None:
    x, y, gate = draw(2, 3, 17), draw(2, 3, 17, seed=1), draw(2, 1, 1)
    parity("gated_residual", torch.float32, (x, y, gate))


def test_rounding_points_are_those_of_the_reference() -> None:
    """Rounding the sum, the gate or the product later gives other bits; float16 shows them."""
    x, y, gate = (draw(4, 8, 64, dtype=torch.float16, seed=s) for s in range(3))
    wide = gate.float() + 2**-13
    got = chosen("gated_residual", torch.float16)(x, y, wide)
    assert torch.equal(got, reference.gated_residual(x, y, wide))
    late = (x.float() + wide * y.float()).half()
    assert not torch.equal(got, late)
    total, _ = chosen("add_rms_norm", torch.float16, width=64)(x, y, draw(64), 1e-6)
    assert torch.equal(total, x + y)


def test_constants_on_a_row_have_no_variance() -> None:
    x = torch.full((2, 5), 3.0)
    got = chosen("layer_norm", torch.float32, width=5)(x, torch.ones(5), torch.zeros(5), 1e-6)
    torch.testing.assert_close(got, torch.zeros(2, 5), atol=1e-6, rtol=0)


def test_no_rows_is_no_work() -> None:
    got = chosen("rms_norm", torch.float32, width=4)(torch.empty(0, 4), torch.ones(4), 1e-6)
    assert got.shape == (0, 4)


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("rms_norm", ((2, 4), (5,), 1e-6), "as wide as x"),
        ("add_rms_norm", ((2, 4), (3, 4), (4,), 1e-6), "one shape"),
        ("layer_norm", ((2, 4), (4,), (5,), 1e-6), "as wide as x"),
        ("gated_residual", ((2, 3, 4), (2, 3, 5), (4,)), "one shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(op: str, args: Any, message: str) -> None:
    tensors = [draw(*a) if isinstance(a, tuple) else a for a in args]
    with pytest.raises(ConfigError, match=message):
        chosen(op, torch.float32, width=4)(*tensors)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"width": 8193, "device.arch": "sm90"}, "width of at most 8192; got 8193"),
        ({"width": 64, "device.arch": "sm75"}, "needs sm80 or newer; got sm75"),
        ({"width": 64, "device.arch": "gfx942"}, "needs sm80 or newer; got gfx942"),
        ({"width": 64}, "the fact 'device.arch'"),
        ({"device.arch": "sm90"}, "the fact 'width'"),
    ],
)
def test_dispatch_falls_back(facts: dict[str, Any], why: str) -> None:
    choice = KernelTable().explain_one("rms_norm", device="cuda", dtype="bfloat16", **facts)
    assert choice.row == "torch.rms_norm"
    assert why in dict(choice.refused)["triton.rms_norm"]


def test_official_rounding_keeps_the_row() -> None:
    for op in ("rms_norm", "ada_rms_norm", "gated_residual", "layer_norm", "gelu_tanh_mul"):
        chosen(op, torch.bfloat16, width=64, rounding="official")
