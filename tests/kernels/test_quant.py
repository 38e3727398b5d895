"""Quantised formats: bounds from the maths, published constants, bits, awkward sizes and values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import quant
from phyai.kernels.policy_quant import COMBINATIONS, MICRO_SCALED, QuantScheme, TensorQuant
from phyai.kernels.quant import (
    FP4_THRESHOLDS,
    LIMITS,
    decode_fp4,
    dequantize,
    dequantize_tokens,
    encode_fp4,
    pack_nibbles,
    quantize,
    quantize_per_token,
    requantize,
    scheme_of,
    unpack_nibbles,
)

SPECS = [
    TensorQuant(dtype, granularity, block, micro_scaled=dtype in MICRO_SCALED)
    for dtype, granularity, block in COMBINATIONS
]
INT8, INT4 = (
    next(s for s in SPECS if s.dtype == "int8"),
    next(s for s in SPECS if s.dtype == "int4"),
)
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# sizes that no block divides, that one divides, and the smallest
SHAPES = ((5, 131), (130, 257), (128, 256), (1, 1))
every_format = pytest.mark.parametrize("spec", SPECS, ids=str)


def draw(*shape: int, seed: int = 0, scale: float = 0.02) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def blocks(weight: Tensor, spec: TensorQuant) -> Iterator[tuple[slice, slice]]:
    """Yield every block of a weight, by plain loops."""
    rows, columns = spec.block_shape or (1, weight.shape[1])
    for i in range(0, weight.shape[0], rows):
        for j in range(0, weight.shape[1], columns):
            yield slice(i, i + rows), slice(j, j + columns)


def bound(block: Tensor, spec: TensorQuant, amax_of_weight: float) -> Tensor:
    """Return the largest error each value of a block may have, from the definition of its format.

    Integers: half a step. Floats: half the distance of neighbours, a relative 2^-(m + 1), and half
    the smallest step near zero. A micro scale is off by its own rounding.
    """
    amax = float(block.abs().max())
    if spec.dtype in ("int8", "int4"):
        return torch.full_like(block, amax / LIMITS[spec.dtype] / 2)
    if spec.dtype in ("fp8_e4m3", "fp8_e5m2"):
        bits, smallest = (4, 2.0**-9) if spec.dtype == "fp8_e4m3" else (3, 2.0**-16)
        return block.abs() * 2.0**-bits + amax / LIMITS[spec.dtype] * smallest / 2
    if spec.dtype == "mxfp4":
        # amax lies in [4, 8) steps; what is past 6 saturates, by less than 2
        step = 2.0 ** (torch.frexp(torch.tensor(amax)).exponent.item() - 3)
        return (block.abs() / step - 6).clamp(min=0) * step + torch.where(
            block.abs() <= 2 * step, step / 4, torch.where(block.abs() <= 4 * step, step / 2, step)
        )
    # its scale is rounded to e4m3 (a relative 2^-4, or half its smallest step), values to e2m1
    unit = amax_of_weight / (448 * 6)
    scale = amax / 6
    slack = max(scale / 16, unit * 2.0**-10)
    return (block.abs() / 4 + (scale + slack) / 4).clamp(max=scale + slack) + 6 * slack


@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_values_come_back_within_the_bound_of_their_format(
    spec: TensorQuant, shape: tuple[int, int]
) -> None:
    weight = draw(*shape)
    weight[0, 0] = 0.11  # an outlier
    back = dequantize(quantize(weight, spec))
    assert back.shape == weight.shape
    largest = float(weight.abs().max())
    for at in blocks(weight, spec):
        error = (back[at] - weight[at]).abs()
        limit = bound(weight[at], spec, largest) * (1 + 1e-5)
        assert bool((error <= limit).all()), (spec, at)


@every_format
def test_what_a_format_can_hold_comes_back_exactly(spec: TensorQuant) -> None:
    """Each block holds its largest value, so the scales are powers of two."""
    if spec.dtype in ("int8", "int4"):
        limit = int(LIMITS[spec.dtype])
        exact = torch.arange(-limit, limit + 1).float()
    elif spec.dtype in MICRO_SCALED:
        exact = torch.tensor([sign * value for value in FP4_VALUES for sign in (1, -1)])
    else:
        dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[spec.dtype]
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        exact = codes[codes.isfinite()]
        assert float(exact.max()) == LIMITS[spec.dtype]
    columns = (spec.block_shape or (1, 256))[1]
    row = exact.flip(0).repeat(-(-columns // len(exact)) + 1)[:columns]
    row[0] = exact.abs().max()
    pieces = [row * 2.0**-power for power in (3, 3)]
    weight = torch.stack([torch.cat(pieces), torch.cat(pieces) * -1])
    torch.testing.assert_close(dequantize(quantize(weight, spec)), weight, atol=0, rtol=0)


@every_format
def test_memory_is_what_the_format_says(spec: TensorQuant) -> None:
    made = quantize(draw(256, 512).bfloat16(), spec)
    bits = 4 if spec.dtype in ("int4", "mxfp4", "nvfp4") else 8
    rows, columns = spec.block_shape or (1, 512)
    per_scale = 1 if spec.dtype in MICRO_SCALED else 4
    extra = 4 if spec.dtype == "nvfp4" else 0
    assert made.nbytes == 256 * 512 * bits // 8 + 256 * 512 // (rows * columns) * per_scale + extra
    assert made.values.untyped_storage().nbytes() == made.values.nbytes


@every_format
@pytest.mark.parametrize("size", [1e-36, 1e-8, 1e8, 1e36])
def test_the_size_of_weights_does_not_matter(spec: TensorQuant, size: float) -> None:
    weight = draw(3, 150, scale=1.0) * size
    back = dequantize(quantize(weight, spec))
    assert bool(back.isfinite().all())
    if size < 2.0**-100:  # below what can be scaled they may vanish, but nothing else
        assert float(back.abs().max()) <= 8e-36
        return
    error = float((back - weight).double().norm() / weight.double().norm())
    assert error < 0.15


@every_format
def test_zero_rows_stay_zero_beside_others(spec: TensorQuant) -> None:
    weight = draw(3, 150)
    weight[1] = 0
    back = dequantize(quantize(weight, spec))
    assert not back[1].any()
    assert back[0].any()
    assert not dequantize(quantize(torch.zeros(2, 20), spec)).any()


@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_no_number_shows_in_its_block_only(spec: TensorQuant, bad: float) -> None:
    weight = draw(260, 300)
    weight[0, 1] = bad
    back = dequantize(quantize(weight, spec))
    assert not bool(back[0, 1].isfinite())
    rows, columns = spec.block_shape or (1, 300)
    if spec.dtype != "nvfp4":  # its global scale is the whole weight's
        assert bool(back[rows:].isfinite().all())
        assert bool(back[:, columns:].isfinite().all())


@every_format
def test_how_many_rows_are_done_at_a_time_does_not_matter(
    spec: TensorQuant, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = draw(300, 40)
    whole = quantize(weight, spec)
    monkeypatch.setattr(quant, "_CHUNK", 1)
    assert len(list(quant.chunks(whole))) == 3
    pieces = quantize(weight, spec)
    assert torch.equal(dequantize(pieces), dequantize(whole))
    assert torch.equal(dequantize(whole, torch.bfloat16), dequantize(whole).bfloat16())


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_did_not_change_keep_their_bits(spec: TensorQuant, dtype: torch.dtype) -> None:
    """As when one of several fused layers is updated: the others were read back from the format."""
    weight = draw(260, 150).to(dtype)
    weight[0, 0] = 0.2
    made = quantize(weight, spec)
    addresses = (made.values.data_ptr(), made.scales.data_ptr())
    before = dequantize(made)
    for _ in range(3):
        requantize(made, dequantize(made, dtype))
        assert torch.equal(dequantize(made), before)
    edited = dequantize(made, dtype)
    edited[200:] = draw(60, 150, seed=1).to(dtype)
    requantize(made, edited)
    rows = (spec.block_shape or (1, 0))[0]
    kept = 200 // rows * rows
    assert torch.equal(dequantize(made)[:kept], before[:kept])
    fresh = dequantize(quantize(edited, spec))  # nvfp4: a global scale one bit off
    torch.testing.assert_close(dequantize(made)[200:], fresh[200:], rtol=1e-6, atol=0)
    assert addresses == (made.values.data_ptr(), made.scales.data_ptr())


def test_a_larger_weight_rounds_nvfp4_anew() -> None:
    spec = next(s for s in SPECS if s.dtype == "nvfp4")
    weight = draw(4, 32)
    made = quantize(weight, spec)
    weight = dequantize(made)
    weight[3, 3] = 5.0
    requantize(made, weight)
    assert float(dequantize(made)[3, 3]) == pytest.approx(5.0, rel=1e-6)
    torch.testing.assert_close(dequantize(made), dequantize(quantize(weight, spec)))


def test_integer_layout_is_what_other_kernels_read() -> None:
    weight = draw(3, 131)
    made = quantize(weight, INT8)
    assert (made.values.dtype, made.values.shape) == (torch.int8, (3, 131))
    assert (made.scales.dtype, made.scales.shape) == (torch.float32, (3, 2))
    for n in range(3):
        for b, part in enumerate((slice(0, 128), slice(128, 131))):
            amax = weight[n, part].abs().max()
            assert made.scales[n, b] == amax / 127
            want = (weight[n, part] / (amax / 127)).round()
            assert (made.values[n, part] - want).abs().max() <= 1
            assert (made.values[n, part] == want).float().mean() > 0.95
    assert made.values.min() >= -127


def test_nibbles_and_twos_complement() -> None:
    codes = torch.tensor([[1, 2, 3], [15, 0, 8]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0x21, 0x03], [0x0F, 0x08]]
    assert torch.equal(unpack_nibbles(packed, 3), codes)
    made = quantize(torch.tensor([[7.0, -7.0, -1.0, 3.0, -6.0]]), INT4)
    assert made.values.tolist() == [[0x97, 0x3F, 0x0A]]


def test_e2m1_rounds_to_nearest_and_ties_to_the_even_code() -> None:
    assert FP4_THRESHOLDS == (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
    assert decode_fp4(torch.arange(16, dtype=torch.uint8)).tolist() == [
        *FP4_VALUES,
        *(-value for value in FP4_VALUES),
    ]
    ties = torch.tensor(FP4_THRESHOLDS)
    for sign in (1, -1):
        assert (sign * decode_fp4(encode_fp4(sign * ties))).tolist() == [0, 1, 1, 2, 2, 4, 4]
        above, below = ties.nextafter(ties + 1), ties.nextafter(ties - 1)
        assert encode_fp4(sign * above).bitwise_and(7).tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert encode_fp4(sign * below).bitwise_and(7).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert decode_fp4(encode_fp4(torch.tensor([7.0, 1e30, -8.0]))).tolist() == [6, 6, -6]
    values = torch.tensor(FP4_VALUES)
    x = draw(4000, scale=3.0).clamp(-6, 6)
    nearest = (x.abs()[:, None] - values).abs().min(dim=1).values
    torch.testing.assert_close((decode_fp4(encode_fp4(x)) - x).abs(), nearest)


def test_micro_scales_follow_their_standards() -> None:
    mx = next(s for s in SPECS if s.dtype == "mxfp4")
    weight = torch.zeros(1, 96)
    weight[0, 0], weight[0, 40], weight[0, 70] = 1.0, 7.9, 0.06
    made = quantize(weight, mx)
    # floor(log2 amax) - 2, biased by 127, as torch's own e8m0 reads it
    assert made.scales.tolist() == [[127 - 2, 127, 127 - 5 - 2]]
    assert made.scales.view(torch.float8_e8m0fnu).float().tolist() == [[0.25, 1.0, 2.0**-7]]
    assert dequantize(made)[0, 40] == 6.0  # past the largest value
    nv = next(s for s in SPECS if s.dtype == "nvfp4")
    weight = torch.zeros(2, 32)
    weight[0, 0], weight[0, 20], weight[1, 0] = 6 * 448 * 0.5, 6 * 17 * 0.5, -6 * 0.5
    made = quantize(weight, nv)
    assert made.global_scale is not None
    assert float(made.global_scale) == 0.5
    assert made.scales.dtype == torch.float8_e4m3fn
    assert made.scales.float().tolist() == [[448, 16], [1, 0]]  # 17 is a tie: even mantissa
    assert dequantize(made)[0, 20] == 6 * 16 * 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_tokens_have_a_scale_each(form: str, dtype: torch.dtype) -> None:
    x = (draw(2, 3, 50, scale=1.0) * torch.tensor([1e-3, 1.0, 50.0])[:, None]).to(dtype)
    x[1, 1] = 0
    found = quantize_per_token(x, form)
    assert found.scales.shape == (2, 3, 1)
    amax = x.float().abs().amax(dim=-1, keepdim=True)
    mine = amax > 0
    assert torch.equal(found.scales[mine], (amax / LIMITS[form])[mine])
    back = dequantize_tokens(found)
    assert not back[1, 1].any()
    for row, want in zip(back.flatten(0, 1), x.float().flatten(0, 1), strict=True):
        spec = TensorQuant(form, "per_channel")
        limit = bound(want, spec, 0.0) * (1 + 1e-5)
        assert bool(((row - want).abs() <= limit).all())


def test_ties_of_tokens_go_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5]])
    assert quantize_per_token(x).values.tolist() == [[127, 0, 2, 2, 0, -2, 126]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_spoils_its_token_only(bad: float) -> None:
    x = draw(3, 20)
    x[1, 4] = bad
    back = dequantize_tokens(quantize_per_token(x))
    assert not bool(back[1].isfinite().any())
    assert bool(back[[0, 2]].isfinite().all())


@pytest.mark.parametrize(("key", "inputs"), COMBINATIONS.items(), ids=str)
def test_schemes_are_read_back_from_facts(
    key: tuple[str, str, tuple[int, int] | None], inputs: tuple[str | None, ...]
) -> None:
    spec = SPECS[list(COMBINATIONS).index(key)]
    for taken in inputs:
        scheme = QuantScheme(
            spec, None if taken is None else TensorQuant(taken, "per_channel", dynamic=True)
        )
        assert scheme_of({**scheme.facts(), "rows": 3}) == scheme
    assert scheme_of({"in_features": 3}) is None


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be \[out, in\] and not empty; got \[3\]"):
        quantize(torch.zeros(3), INT8)
    with pytest.raises(ConfigError, match="not empty"):
        quantize(torch.zeros(0, 3), INT8)
    with pytest.raises(ConfigError, match=r"must be quantised as one of .* got int8 per_tensor"):
        quantize(torch.zeros(2, 3), TensorQuant("int8", "per_tensor"))
    with pytest.raises(ConfigError, match=r"must have the shape \[2, 3\]; got \[2, 4\]"):
        requantize(quantize(torch.zeros(2, 3), INT8), torch.zeros(2, 4))
