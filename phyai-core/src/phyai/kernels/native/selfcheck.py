"""Checks a freshly compiled library, alone in its process: ``python -m ...selfcheck PATH``.

Small cases of every kernel with ends that fill no register and no block: a miscompiled kernel or
an instruction this CPU lacks is found here, not in a robot's action.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.native.library import Library
from phyai.kernels.native.linear import EPILOGUES, linear, pack

# (rows, K, N): single values, ends of registers and panels, several blocks and threads
LINEARS = ((1, 1, 2), (3, 33, 18), (13, 257, 34), (50, 400, 130), (170, 100, 70))
_MULTIPLES = {torch.float32: 32.0, torch.bfloat16: 1.0}  # of the dtype's resolution


def main() -> None:
    """Load the library and compare its kernels with the references."""
    library = Library(Path(sys.argv[1]))
    torch.manual_seed(0)
    torch.set_num_threads(2)
    if hasattr(library, "phyai_linear"):  # libraries of some sources only are checked for those
        for dtype, (rows, k, n) in itertools.product(_MULTIPLES, LINEARS):
            check_linear(library, dtype, rows, k, n)


def check_linear(library: Library, dtype: torch.dtype, rows: int, k: int, n: int) -> None:
    """Exit with a message when a packed linear of this shape differs from the reference."""
    x = torch.randn(rows, k).to(dtype)
    weight = (torch.randn(n, k) / k**0.5).to(dtype)
    bias = torch.randn(n).to(dtype)
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


def expected_linear(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> Tensor:
    """Return the reference of linear and epilogue; the sum is exact before it is rounded."""
    exact = None if bias is None else bias.double()
    total = reference.linear(x.double(), weight.double(), exact).to(x.dtype)
    return total if epilogue == "none" else getattr(reference, epilogue)(total)


def close(got: Tensor, wanted: Tensor) -> bool:
    """Return whether all values agree to a few roundings of their dtype."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    bound = torch.finfo(got.dtype).eps * _MULTIPLES[got.dtype]
    # a sum that lies between two values may round to either, and activations carry that on
    return torch.allclose(got.double(), wanted.double(), rtol=2 * bound, atol=2 * bound)


if __name__ == "__main__":
    main()
