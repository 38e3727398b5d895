"""Quantised linear layers and norms in Triton, chosen by dispatch, against their truth in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import KernelTable, quant_linear, quant_norm
from phyai.kernels.quant import (
    QuantizedActivations,
    dequantize_tokens,
    quantize_per_token,
    scheme_of,
)
from phyai.kernels.quant_linear import QuantizedWeight
from phyai.kernels.triton import quant_linear as kernels
from phyai.kernels.triton.launch import assume
from tests.kernels.triton_parity import DTYPES, close, draw

FORMS = {"int8:int8": "int8_linear", "int8": "int8_weight_linear"}
# rows, inputs, outputs: odd ones, the smallest, whole blocks
SHAPES = ((3, 300, 17), (1, 1, 1), (64, 128, 32))


def facts_of(form: str) -> dict[str, Any]:
    weight, _, taken = form.partition(":")
    found = {"quant.weight": weight, "quant.format": weight, "quant.granularity": "block"}
    return {**found, "quant.input": taken} if taken else found


def packed(outputs: int, inputs: int, form: str, dtype: torch.dtype) -> QuantizedWeight:
    weight = draw(outputs, inputs, dtype=dtype, seed=3)
    return quant_linear.pack(weight, scheme=scheme_of(facts_of(form)))


def chosen(op: str, name: str, dtype: torch.dtype, **facts: Any) -> Any:
    kernel = KernelTable().choose(
        op, device="cuda", dtype=dtype, **{"device.arch": "sm90", "rounding": "official", **facts}
    )
    assert kernel.row.name == f"triton.{name}"
    return kernel.fn


def linear(form: str, dtype: torch.dtype) -> Any:
    return chosen("linear", FORMS[form], dtype, packed=True, **facts_of(form))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_rows(form: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inputs, outputs = shape
    weight, bias = packed(outputs, inputs, form, dtype), draw(outputs, dtype=dtype, seed=4)
    x = draw(1, rows, inputs + 5, dtype=dtype)[..., 2:-3]
    fn = linear(form, dtype)
    close(fn(x, weight, bias), quant_linear.linear(x, weight, bias), factor=4)
    if rows == 3:
        close(fn(x[0, 0], weight), quant_linear.linear(x[0, 0], weight), factor=4)


@pytest.mark.parametrize("form", FORMS)
def test_large_tiles_of_many_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.float16
    x, weight = draw(66, 130, dtype=dtype), packed(500, 130, form, dtype)
    monkeypatch.setattr(kernels, "processors", lambda _: 4)
    with assume(90, record=True) as launches:
        linear(form, dtype)(x, weight)
    assert launches[-1].meta["ROWS"] == 128
    close(linear(form, dtype)(x, weight), quant_linear.linear(x, weight), factor=4)


def test_products_of_a_block_are_exact() -> None:
    """All values at their limit: 128 * 127^2 has 21 bits; in fp16 it would be lost."""
    x, weight = torch.full((1, 256), 2.0), torch.full((3, 256), 0.5)
    weight[1, ::2] = -0.5
    made = quant_linear.pack(weight, scheme=scheme_of(facts_of("int8:int8")))
    out = linear("int8:int8", torch.float32)(x, made)
    torch.testing.assert_close(out, torch.tensor([[256.0, 0.0, 256.0]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 17), (2, 5000)], ids=str)
def test_tokens_round_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    x[..., 0, :] *= 30
    x[..., -1, 1:3] = 0.5 * x[..., -1, :1]
    got, want = kernels.quantize_per_token(x), quantize_per_token(x)
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.scales, want.scales)


def test_ties_zeros_and_tiny_tokens() -> None:
    x = torch.zeros(4, 40)
    x[0, :7] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5])
    x[2], x[3] = 1e-38, 1e38
    got, want = kernels.quantize_per_token(x), quantize_per_token(x)
    assert got.values[0, :7].tolist() == [127, 0, 2, 2, 0, -2, 126]
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.scales, want.scales)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_spoils_its_token_only(bad: float) -> None:
    x = draw(3, 40)
    x[1, 30] = bad
    out = linear("int8:int8", torch.float32)(x, packed(5, 40, "int8:int8", torch.float32))
    assert not bool(out[1].isfinite().any())
    assert bool(out[[0, 2]].isfinite().all())
    rounded = chosen("rms_norm_quant", "rms_norm_quant", torch.float32, width=40)
    scales = rounded(x, torch.ones(40), 1e-6).scales.flatten()
    assert scales.isfinite().tolist() == [True, False, True]


def norm_calls(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    x, y = (draw(2, 3, 24, dtype=dtype, seed=s)[..., 3:-4] for s in (0, 1))
    weight = draw(17, seed=2)
    scale, shift, gate = draw(2, 1, 3 * 17, seed=4).chunk(3, dim=-1)
    return {
        "rms_norm_quant": (x, weight, 1e-6, 0.0),
        "add_rms_norm_quant": (x, y, weight, 1e-6),
        "ada_rms_norm_quant": (x, scale, shift, 1e-6),
        "gated_ada_rms_norm_quant": (x, y, gate, scale, shift, 1e-6),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", norm_calls(torch.float32))
def test_norms_that_round(op: str, dtype: torch.dtype) -> None:
    args = norm_calls(dtype)[op]
    got = chosen(op, op, dtype, width=17)(*args)
    want = getattr(quant_norm, op)(*args)
    if not isinstance(want, QuantizedActivations):
        close(got[0], want[0])
        got, want = got[1], want[1]
    assert isinstance(got, QuantizedActivations)
    assert got.values.shape == want.values.shape
    assert got.scales.shape == want.scales.shape
    steps = (got.values.int() - want.values.int()).abs()
    # the interpreter truncates to bfloat16 before the rounding to int8
    assert int(steps.max()) <= (2 if dtype == torch.bfloat16 else 1)
    assert float((steps > 0).float().mean()) < (0.4 if dtype == torch.bfloat16 else 0.02)
    torch.testing.assert_close(
        got.scales, want.scales, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-3, atol=0
    )


def test_a_norm_feeds_a_linear_layer_without_another_kernel() -> None:
    dtype = torch.float32
    weight = packed(5, 17, "int8:int8", dtype)
    tokens = chosen("rms_norm_quant", "rms_norm_quant", dtype, width=17)(
        *norm_calls(dtype)["rms_norm_quant"]
    )
    with assume(90, record=True) as launches:
        linear("int8:int8", dtype)(tokens, weight)
    assert [launch.kernel.__name__ for launch in launches] == ["int8_linear_kernel"]
    out = linear("int8:int8", dtype)(tokens, weight)
    exact = dequantize_tokens(tokens) @ weight.unpack().T
    torch.testing.assert_close(out, exact, rtol=1e-5, atol=1e-5)


def test_no_rows_is_no_work() -> None:
    for form in FORMS:
        out: Tensor = linear(form, torch.float32)(
            torch.empty(0, 40), packed(5, 40, form, torch.float32)
        )
        assert out.shape == (0, 5)


def test_what_does_not_fit_is_refused() -> None:
    weight = packed(5, 40, "int8", torch.float32)
    fn = linear("int8", torch.float32)
    with pytest.raises(ConfigError, match=r"takes x \[..., 40\]"):
        fn(draw(3, 41), weight)
    with pytest.raises(ConfigError, match="one value per output"):
        fn(draw(3, 40), weight, draw(6))
    facts = {"quant.weight": "fp8_e4m3", "quant.granularity": "per_channel"}
    fp8 = quant_linear.pack(draw(5, 40), scheme=scheme_of(facts))
    with pytest.raises(ConfigError, match=r"must have blocks \[1, 128\]"):
        fn(draw(3, 40), fp8)
