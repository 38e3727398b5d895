"""Checks a freshly compiled library, alone in its process: ``python -m ...selfcheck PATH``.

Small cases of every kernel with ends that fill no register and no block: a miscompiled kernel or
an instruction this CPU lacks is found here, not in a robot's action.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from phyai.kernels import quant_linear, reference
from phyai.kernels.native import attention, call, elementwise, norm, rope
from phyai.kernels.native.build import checked_line
from phyai.kernels.native.library import Library
from phyai.kernels.native.linear import EPILOGUES, linear, pack
from phyai.kernels.native.quant_linear import WEIGHT, linear_int8, pack_int8
from phyai.kernels.policy_quant import QuantScheme, TensorQuant

# (rows, K, N): single values, ends of registers and panels, several blocks and threads
LINEARS = ((1, 1, 2), (3, 33, 18), (13, 257, 34), (50, 400, 130), (170, 100, 70))
INT8_SCHEMES = tuple(
    QuantScheme(WEIGHT, taken) for taken in (None, TensorQuant("int8", "per_channel", dynamic=True))
)
_MULTIPLES = {torch.float32: 32.0, torch.bfloat16: 1.0}  # of the dtype's resolution
_EPS = 1e-6


def main() -> None:
    """Load the library and compare its kernels with the references."""
    library = Library(Path(sys.argv[1]))
    torch.manual_seed(0)
    torch.set_num_threads(2)
    if hasattr(library, "phyai_linear"):  # libraries of some sources only are checked for those
        for dtype, (rows, k, n) in itertools.product(_MULTIPLES, LINEARS):
            check_linear(library, dtype, rows, k, n)
            check_int8(library, dtype, rows, k, n)
    with mock.patch.object(call, "library", return_value=library):
        for dtype in _MULTIPLES:
            for entry, op, args in row_cases(dtype):
                if hasattr(library, entry):
                    check_row(op, args, f"{dtype}, {library.isa}")
    print(checked_line(library.path))


def check_linear(library: Library, dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    """Exit with a message when a packed linear of this shape differs from the reference."""
    x, weight, bias = _layer(dtype, rows, k, n)
    for interleave in (False, True):
        packed = pack(weight, interleave=interleave, lib=library)
        where = f"[{rows}, {k}] x [{n}, {k}] {dtype}, interleave={interleave}, {library.isa}"
        if not torch.equal(packed.unpack(), weight):
            sys.exit(f"a packed weight does not unpack to itself: {where}")
        for epilogue in EPILOGUES:
            if interleave or not epilogue.endswith("_mul"):
                got = linear(x, packed, bias, epilogue)
                if not close(got, expected_linear(x, weight, bias, epilogue)):
                    sys.exit(f"linear with epilogue {epilogue} is wrong: {where}")


def check_int8(library: Library, dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    """Exit with a message when an int8 linear of this shape differs from the reference."""
    x, weight, bias = _layer(dtype, rows, k, n)
    for scheme, epilogue in itertools.product(INT8_SCHEMES, ("none", "silu_mul")):
        truth = quant_linear.pack(weight, scheme=scheme)
        packed = pack_int8(weight, epilogue, scheme, lib=library)
        where = f"[{rows}, {k}] x [{n}, {k}] {dtype}, {scheme}, {library.isa}"
        if not torch.equal(packed.unpack(), truth.unpack()):
            sys.exit(f"a packed int8 weight does not unpack to itself: {where}")
        if not close(
            linear_int8(x, packed, bias, epilogue), expected_int8(x, truth, bias, epilogue)
        ):
            sys.exit(f"int8 linear with epilogue {epilogue} is wrong: {where}")


def check_row(op: Callable[..., Any], args: tuple[Any, ...], where: str) -> None:
    """Exit with a message when an op differs from its reference, or leaves the work to it."""
    name = op.__name__
    copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    wanted = getattr(reference, name)(*copies)
    with mock.patch.object(reference, name, side_effect=NotImplementedError(name)):
        got = op(*args)
    # caches are arguments that the op writes to
    pairs = zip((*_results(got), *args), (*_results(wanted), *copies), strict=True)
    if not all(close(mine, theirs) for mine, theirs in pairs if isinstance(mine, Tensor)):
        sys.exit(f"{name} is wrong: {where}")


def row_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Yield C function, op and arguments of small calls of every op but linear."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    for width in (5, 83):
        x, y, w, b = draw(2, 3, width), draw(2, 3, width), torch.randn(width), torch.randn(width)
        gate, scale, shift = torch.randn(3, 2, 1, width)
        yield "phyai_norm", norm.rms_norm, (x, w, _EPS)
        yield "phyai_norm", norm.add_rms_norm, (x, y, w, _EPS, 0.0)
        yield "phyai_norm", norm.layer_norm, (x, w, b, _EPS)
        yield "phyai_norm", norm.gated_ada_rms_norm, (x, y, gate, scale, shift, _EPS)
        yield "phyai_norm", norm.gated_ada_layer_norm, (x, y, gate, scale, shift, _EPS)
        yield "phyai_gated", elementwise.gelu_tanh_mul, (draw(2, 3, 2 * width),)
        yield "phyai_gated", elementwise.silu_mul, (draw(2, 3, 2 * width),)
        yield "phyai_bias_gelu", elementwise.bias_gelu_tanh, (x, b.to(dtype))
    q, k, v = draw(2, 5, 4, 22), draw(2, 5, 2, 22), draw(2, 5, 2, 22)
    angle = torch.randn(2, 5, 11).repeat(1, 1, 2)
    turn = (angle.cos().to(dtype), angle.sin().to(dtype))
    slots = torch.tensor([3, 9, 1, 0, 4, 11, 2, 6, 7, 10])
    yield "phyai_rope", rope.apply_rope, (q, *turn)
    caches = (torch.zeros(12, 2, 22, dtype=dtype), torch.zeros(12, 2, 22, dtype=dtype))
    yield "phyai_rope_write", rope.rope_kv_write, (q, k, v, *turn, *caches, slots)
    yield "phyai_kv_write", rope.kv_write, (caches[0], slots, v.flatten(0, 1))
    keys, values, mask = draw(2, 37, 2, 22), draw(2, 37, 2, 22), torch.rand(2, 37) < 0.7
    yield "phyai_attention", attention.attention, (q, keys, values, 0.2)
    yield "phyai_attention", attention.attention, (q, keys, values, 0.2, mask)


def expected_linear(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> Tensor:
    """Return the reference of linear and epilogue; the sum is exact before it is rounded."""
    exact = None if bias is None else bias.double()
    total = reference.linear(x.double(), weight.double(), exact).to(x.dtype)
    return total if epilogue == "none" else getattr(reference, epilogue)(total)


def expected_int8(
    x: Tensor, weight: quant_linear.QuantizedWeight, bias: Tensor | None, epilogue: str
) -> Tensor:
    """Return the reference of a quantised linear and epilogue."""
    total = quant_linear.linear(x, weight, bias)
    return total if epilogue == "none" else getattr(reference, epilogue)(total)


def close(got: Tensor, wanted: Tensor) -> bool:
    """Return whether all values agree to a few roundings of their dtype."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    bound = torch.finfo(got.dtype).eps * _MULTIPLES.get(got.dtype, 1.0)
    # a sum that lies between two values may round to either, and activations carry that on
    return torch.allclose(got.double(), wanted.double(), rtol=2 * bound, atol=2 * bound)


def _layer(dtype: torch.dtype, rows: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k) / k**0.5, torch.randn(n)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def _results(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


if __name__ == "__main__":
    main()
