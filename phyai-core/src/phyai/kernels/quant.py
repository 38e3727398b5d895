"""Quantised weights and activations in plain torch: rounding to each format, and back.

Symmetric, rounded to nearest, ties to even. A weight [N, K] is cut into blocks that share a scale:
a row (``per_channel``), or [rows, columns] of its ``block_shape``; the last ones may be partial.

| format | values | scale of a block |
|---|---|---|
| int8, int4 | -127..127, -7..7 | fp32, amax / 127, amax / 7 |
| fp8_e4m3, fp8_e5m2 | up to 448, 57344 | fp32, amax / 448, amax / 57344 |
| mxfp4 | e2m1, up to 6 | power of two (e8m0), 2^(floor(log2 amax) - 2); values past 6 saturate |
| nvfp4 | e2m1, up to 6 | e4m3, amax / 6 / global; global = amax of the weight / (448 * 6) |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels.policy_quant import COMBINATIONS, MICRO_SCALED, QuantScheme, TensorQuant

FP4_MAX = 6.0
FP4_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie goes to the value with the even code."""
LIMITS = {"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
TINY = 2.0**-100
"""Blocks and tokens without larger values are scaled as if they had this one: no 0 / 0."""

_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOKEN_DTYPES = {"int8": torch.int8, **_FLOAT8}
"""Format of rounded inputs -> dtype of their values."""

_E8M0_BIAS, _FP4_EXPONENT = 127, 2
_CHUNK = 2**20  # values in fp32 at a time: 4 MB
_ROWS = 128  # chunks are multiples of it: no block is cut


class QuantizedActivations(NamedTuple):
    """Tokens with a scale each: values [..., K] (int8 or fp8) times scales [..., 1] fp32."""

    values: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight [N, K] in a quantised format, the same layout for every kernel.

    values: int8 or fp8 [N, K]; of 4-bit formats uint8 [N, ceil(K / 2)], even columns in the low
        nibble, int4 in two's complement.
    scales: [ceil(N / rows), ceil(K / columns)] of the blocks: fp32, of mxfp4 uint8 (biased
        exponents), of nvfp4 fp8_e4m3.
    global_scale: fp32 without dims, of nvfp4 only.
    """

    values: Tensor
    scales: Tensor
    spec: TensorQuant
    shape: tuple[int, int]
    global_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.global_scale)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def block(self) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        return self.spec.block_shape or (1, self.shape[1])


def quantize(weight: Tensor, spec: TensorQuant) -> QuantizedTensor:
    """Return a weight rounded to ``spec``; only some rows at a time exist in fp32.

    Shapes: weight [N, K], not empty, of any float dtype. A NaN or infinite weight makes its block
    so (of nvfp4 the whole weight), and with it the layer's result.
    Raises: ConfigError for another shape or format.
    """
    if weight.dim() != 2 or 0 in weight.shape:
        raise ConfigError(
            f"a weight to quantise must be [out, in] and not empty; got {list(weight.shape)}. "
            "Leave this layer as it is (scheme: null)."
        )
    made = _empty((weight.shape[0], weight.shape[1]), spec, weight.device)
    if made.global_scale is not None:
        made.global_scale.copy_(_global_scale(weight))
    for rows in chunks(made):
        _write(made, rows, *_encode(weight[rows].float(), made))
    return made


def requantize(made: QuantizedTensor, weight: Tensor) -> None:
    """Take other values in the same storage; rows that hold what they did keep their bits.

    weight: [N, K]. A row is compared with its ``dequantize`` in the weight's dtype, whole blocks of
    rows where they share scales. Another global scale rounds every row anew.
    Raises: ConfigError when the shape differs.
    """
    if tuple(weight.shape) != made.shape:
        raise ConfigError(
            f"another weight must have the shape {list(made.shape)}; got {list(weight.shape)}. "
            "Quantise it as a new layer."
        )
    anew = False
    if made.global_scale is not None:
        scale = _global_scale(weight)
        anew = not torch.allclose(scale, made.global_scale, rtol=1e-6, atol=0)
    pending = [(rows, _changed(made, weight, rows, anew)) for rows in chunks(made)]
    if made.global_scale is not None and anew:
        made.global_scale.copy_(scale)
    for rows, changed in pending:
        if bool(changed.any()):
            _write(made, rows, *_encode(weight[rows].float(), made), changed)


def dequantize(made: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weight [N, K] that the values stand for, in fp32 or rounded once to ``dtype``."""
    out = torch.empty(made.shape, dtype=dtype, device=made.values.device)
    for rows in chunks(made):
        out[rows] = dequantize_rows(made, rows)
    return out


def dequantize_rows(made: QuantizedTensor, rows: slice) -> Tensor:
    """Return some rows in fp32. ``rows`` starts where a block of rows does, see ``chunks``."""
    block_rows, columns = made.block
    values = _decode(made.values[rows], made.spec.dtype, made.shape[1])
    scales = _wide_scales(made.scales[_blocks(rows, block_rows)], made)
    if block_rows > 1:
        scales = scales.repeat_interleave(block_rows, dim=0)[: values.shape[0]]
    whole = made.shape[1] // columns * columns
    blocks = values[:, :whole].view(len(values), -1, columns)
    blocks.mul_(scales[:, : whole // columns, None])
    if whole < made.shape[1]:
        values[:, whole:].mul_(scales[:, -1:])
    return values


def chunks(made: QuantizedTensor) -> Iterator[slice]:
    """Yield the rows of a weight, so many at a time that their fp32 copy stays small."""
    step = max(_CHUNK // made.shape[1] // _ROWS, 1) * _ROWS
    for start in range(0, made.shape[0], step):
        yield slice(start, min(start + step, made.shape[0]))


def quantize_per_token(x: Tensor, dtype: str = "int8") -> QuantizedActivations:
    """Return tokens [..., K] rounded to ``dtype`` (int8 or fp8), each with its own scale.

    scale = amax(|x|) / limit in fp32; value = x * (1 / scale), rounded to nearest even. Both
    divisions are exact to the last bit, so that kernels can agree with this bit for bit.
    A NaN or infinite value makes its token's scale so, and with it the layer's result.
    """
    limit = LIMITS[dtype]
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=TINY) / limit
    return QuantizedActivations(_rounded(wide * (1.0 / scales), dtype), scales)


def dequantize_tokens(x: QuantizedActivations) -> Tensor:
    """Return the tokens [..., K] in fp32."""
    return x.values.float() * x.scales


def scheme_of(facts: Mapping[str, Any]) -> QuantScheme | None:
    """Return the scheme whose ``QuantScheme.facts`` are among these facts; None without any.

    >>> from phyai.kernels.quant import scheme_of
    >>> str(scheme_of({"quant.weight": "int8", "quant.granularity": "block"}))
    'int8 block [1, 128], 16-bit inputs'
    """
    dtype, granularity = facts.get("quant.weight"), facts.get("quant.granularity")
    for known, layout, block in COMBINATIONS:
        if (known, layout) == (dtype, granularity):
            weight = TensorQuant(known, layout, block, micro_scaled=known in MICRO_SCALED)
            taken = facts.get("quant.input")
            inputs = None if taken is None else TensorQuant(taken, "per_channel", dynamic=True)
            return QuantScheme(weight, inputs)
    return None


# ---------------------------------------------------------------- blocks and scales


def _empty(shape: tuple[int, int], spec: TensorQuant, device: torch.device) -> QuantizedTensor:
    if (spec.dtype, spec.granularity, spec.block_shape) not in COMBINATIONS:
        known = "; ".join(
            f"{dtype} {layout}{'' if block is None else f' {list(block)}'}"
            for dtype, layout, block in COMBINATIONS
        )
        raise ConfigError(f"weights must be quantised as one of {known}; got {spec}.")
    (n, k), four_bits = shape, spec.dtype in ("int4", *MICRO_SCALED)
    rows, columns = spec.block_shape or (1, k)
    held = torch.uint8 if four_bits else _FLOAT8.get(spec.dtype, torch.int8)
    scale = {"mxfp4": torch.uint8, "nvfp4": torch.float8_e4m3fn}.get(spec.dtype, torch.float32)
    return QuantizedTensor(
        torch.empty(n, -(-k // 2) if four_bits else k, dtype=held, device=device),
        torch.empty(-(-n // rows), -(-k // columns), dtype=scale, device=device),
        spec,
        shape,
        torch.empty((), dtype=torch.float32, device=device) if spec.dtype == "nvfp4" else None,
    )


def _encode(wide: Tensor, made: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Return values and scales of some rows [R, K] in fp32."""
    block_rows, columns = made.block
    n, k = wide.shape
    padded = F.pad(wide, (0, -k % columns, 0, -n % block_rows))
    down, across = padded.shape[0] // block_rows, padded.shape[1] // columns
    blocks = padded.view(down, block_rows, across, columns)
    scales = _scales(blocks.abs().amax(dim=(1, 3)), made)
    held = _wide_scales(scales, made)
    inverse = torch.where(held > 0, 1.0 / held, 0.0)  # an e4m3 scale may round to zero
    scaled = (blocks * inverse[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    return _rounded(scaled, made.spec.dtype), scales


def _scales(amax: Tensor, made: QuantizedTensor) -> Tensor:
    """Return the scales of blocks as they are stored; NaN or infinite where amax is."""
    dtype = made.spec.dtype
    if dtype == "mxfp4":
        exponent = torch.frexp(amax.clamp(min=TINY)).exponent - 1 - _FP4_EXPONENT
        finite = exponent.clamp(min=-_E8M0_BIAS) + _E8M0_BIAS
        return torch.where(amax.isfinite(), finite, 255).to(torch.uint8)
    if dtype == "nvfp4":
        assert made.global_scale is not None
        return (amax / FP4_MAX / made.global_scale).clamp(max=448.0).to(torch.float8_e4m3fn)
    return amax.clamp(min=TINY) / LIMITS[dtype]


def _wide_scales(scales: Tensor, made: QuantizedTensor) -> Tensor:
    """Return stored scales in fp32."""
    if made.spec.dtype == "mxfp4":
        exponent = scales.int() - _E8M0_BIAS
        power = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), exponent)
        return torch.where(scales == 255, math.nan, power)
    if made.global_scale is not None:
        return scales.float() * made.global_scale
    return scales


def _global_scale(weight: Tensor) -> Tensor:
    """Return amax / (448 * 6) in fp32."""
    amax = torch.stack([weight.amax().float(), -weight.amin().float()]).amax()
    return amax.clamp(min=TINY) / (LIMITS["fp8_e4m3"] * FP4_MAX)


def _blocks(rows: slice, block_rows: int) -> slice:
    return slice(rows.start // block_rows, -(-rows.stop // block_rows))


def _write(
    made: QuantizedTensor,
    rows: slice,
    values: Tensor,
    scales: Tensor,
    changed: Tensor | None = None,
) -> None:
    """Store encoded rows, only those of ``changed`` blocks of rows [ceil(R / rows)] when given."""
    block_rows = made.block[0]
    old_values, old_scales = made.values[rows], made.scales[_blocks(rows, block_rows)]
    if changed is None:
        old_values.copy_(values)
        old_scales.copy_(scales)
        return
    lines = changed.repeat_interleave(block_rows)[: values.shape[0]]
    # as bytes: not every device can pick rows of fp8
    as_bytes(old_values)[lines] = as_bytes(values)[lines]
    if scales.dtype is torch.float8_e4m3fn:
        old_scales, scales = as_bytes(old_scales), as_bytes(scales)
    old_scales[changed] = scales[changed]


def _changed(made: QuantizedTensor, weight: Tensor, rows: slice, anew: bool) -> Tensor:
    """Return which blocks of some rows hold other values than before."""
    block_rows = made.block[0]
    held = dequantize_rows(made, rows).to(weight.dtype)
    differs = (held != weight[rows]).any(dim=1) | anew
    return F.pad(differs, (0, -len(differs) % block_rows)).view(-1, block_rows).any(dim=1)


# ---------------------------------------------------------------- values


def _rounded(scaled: Tensor, dtype: str) -> Tensor:
    """Return values divided by their scales, rounded to a format, in the form it is stored."""
    if dtype in MICRO_SCALED:
        return pack_nibbles(encode_fp4(scaled))
    limit = LIMITS[dtype]
    if dtype in _FLOAT8:
        return scaled.clamp(-limit, limit).to(_FLOAT8[dtype])
    whole = scaled.round().clamp(-limit, limit).to(torch.int8)
    return pack_nibbles(whole.view(torch.uint8) & 15) if dtype == "int4" else whole


def _decode(values: Tensor, dtype: str, width: int) -> Tensor:
    """Return stored values [R, ...] in fp32 [R, width], without their scales."""
    if dtype in MICRO_SCALED:
        return decode_fp4(unpack_nibbles(values, width))
    if dtype == "int4":
        nibbles = unpack_nibbles(values, width).view(torch.int8)
        return ((nibbles ^ 8) - 8).float()
    return values.float()


def encode_fp4(x: Tensor) -> Tensor:
    """Return the e2m1 codes (uint8, 0..15, sign in bit 3) nearest to fp32 values; past 6 is 6."""
    # A tie at an odd threshold goes up: what lies at it must lie past the bound.
    bounds = torch.tensor(FP4_THRESHOLDS, dtype=torch.float32, device=x.device)
    bounds[1::2] = bounds[1::2].nextafter(bounds.new_zeros(()))
    codes = torch.bucketize(x.abs(), bounds, out_int32=True).to(torch.uint8)
    return codes | ((x < 0).to(torch.uint8) << 3)


def decode_fp4(codes: Tensor) -> Tensor:
    """Return the fp32 values of e2m1 codes (uint8, 0..15)."""
    size = codes & 7
    # Twice the value: m below one, else (2 + m) * 2^(exponent - 1), in whole numbers.
    shift = (size >> 1).clamp(min=1) - 1
    doubled = torch.where(size < 2, size, ((size & 1) | 2) << shift).view(torch.int8)
    return torch.where(codes >= 8, -doubled, doubled).float() * 0.5


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return codes 0..15 [R, K] as [R, ceil(K / 2)], even columns in the low four bits."""
    padded = F.pad(codes, (0, codes.shape[1] % 2))
    return padded[:, ::2] | (padded[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor, width: int) -> Tensor:
    """Return the codes 0..15 [R, width] of ``pack_nibbles``."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)[:, :width]


def as_bytes(values: Tensor) -> Tensor:
    """Return a view of 8-bit values as uint8."""
    return values.view(torch.uint8)
