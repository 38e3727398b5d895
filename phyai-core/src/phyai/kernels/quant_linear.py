"""Linear layers over quantised weights in plain torch: the truth of every faster row.

Everything after the rounding of weights and inputs is fp32, and the result is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels.policy_quant import QuantScheme
from phyai.kernels.quant import (
    TOKEN_DTYPES,
    QuantizedActivations,
    QuantizedTensor,
    chunks,
    dequantize,
    dequantize_rows,
    dequantize_tokens,
    quantize,
    quantize_per_token,
    requantize,
)


class QuantizedWeight:
    """A weight [out, in] as ``QuantizedTensor``: what the torch and the Triton rows take.

    dtype: of the weight it was made from, and of the results.
    input_format: what inputs are rounded to per token, None for none.
    """

    def __init__(self, weight: Tensor, scheme: QuantScheme) -> None:
        self.tensor: QuantizedTensor = quantize(weight, scheme.weight)
        self.dtype = weight.dtype
        self.input_format = None if scheme.input is None else scheme.input.dtype

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def unpack(self) -> Tensor:
        return dequantize(self.tensor, self.dtype)

    def repack(self, weight: Tensor) -> None:
        requantize(self.tensor, weight)


def pack(
    weight: Tensor, epilogue: str = "none", scheme: QuantScheme | None = None
) -> QuantizedWeight:
    """Return a weight [out, in] rounded to the scheme's format."""
    if scheme is None:
        raise ConfigError("a quantised layer must have a scheme; got none. Pass one to pack.")
    return QuantizedWeight(weight, scheme)


def linear(
    x: Tensor | QuantizedActivations, weight: QuantizedWeight, bias: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias, the weight unpacked some rows at a time.

    Shapes: x [..., in], bias [out] -> [..., out] in the weight's dtype. x is rounded per token when
    the weight's ``input_format`` says so, or comes rounded already.
    Rounding: products of the rounded values in fp32, with bias; the result once.
    Raises: ConfigError when x has another width or dtype.
    """
    wide = _tokens(x, weight)
    made = weight.tensor
    out = torch.empty(*wide.shape[:-1], made.shape[0], dtype=weight.dtype, device=wide.device)
    for rows in chunks(made):
        part = None if bias is None else bias[rows].float()
        out[..., rows] = F.linear(wide, dequantize_rows(made, rows), part)
    return out


def check_input(x: Tensor | QuantizedActivations, weight: QuantizedWeight) -> None:
    """Raises: ConfigError unless x [..., in] has the weight's dtype, or its input format."""
    values = x if isinstance(x, Tensor) else x.values
    width = weight.tensor.shape[1]
    rounded = None if weight.input_format is None else TOKEN_DTYPES[weight.input_format]
    wanted = weight.dtype if isinstance(x, Tensor) else rounded
    if values.dim() == 0 or values.shape[-1] != width or values.dtype != wanted:
        raise ConfigError(
            f"a quantised linear takes x [..., {width}] {weight.dtype}, or the same rounded to "
            f"{weight.input_format or 'nothing else'}; got {list(values.shape)} {values.dtype}. "
            "Cast the input first."
        )


def _tokens(x: Tensor | QuantizedActivations, weight: QuantizedWeight) -> Tensor:
    """Return the input in fp32 as the layer sees it."""
    check_input(x, weight)
    if not isinstance(x, Tensor):
        return dequantize_tokens(x)
    if weight.input_format is None:
        return x.float()
    return dequantize_tokens(quantize_per_token(x, weight.input_format))
