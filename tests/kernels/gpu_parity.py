"""Every Triton row at released sizes against the reference, also replayed from a CUDA graph.

Run by `test_triton_gpu.py` in a process without TRITON_INTERPRET; prints one line per call and
exits with 1 when one differs. ``python -m tests.kernels.gpu_parity [DEVICE [ROWS]]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phyai.kernels import CATALOGUE, KernelRow, KernelTable, quant_linear
from phyai.kernels.facts import device_facts
from phyai.kernels.policy_quant import QuantScheme
from phyai.kernels.quant import QuantizedActivations, dequantize_tokens, scheme_of
from phyai.kernels.quant_linear import QuantizedWeight
from phyai.kernels.triton.examples import Example, examples
from phyai.kernels.triton_rows import PACKAGE

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative norm of the difference: the order of sums differs, and attention keeps more bits.
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
ROUNDED = 2e-3
"""Of norms rounded to int8: now and then a value falls on the other side of a tie."""


def real(tensor: Tensor, device: torch.device, seed: int) -> Tensor:
    """Return random values of the shape and dtype of a tensor without memory."""
    generator = torch.Generator().manual_seed(seed)
    shape, dtype = tensor.shape, tensor.dtype
    if dtype == torch.bool:
        return (torch.rand(shape, generator=generator) < 0.7).to(device)
    if dtype == torch.int64:  # slots
        return torch.randperm(shape[0], generator=generator).to(device)
    if dtype == torch.int32:
        return torch.randint(-512, 512, shape, generator=generator, dtype=dtype).to(device)
    return torch.randn(shape, generator=generator).to(device, dtype)


def fill(example: Example, device: torch.device) -> list[Any]:
    scheme = scheme_of(example.facts)
    return [filled(arg, scheme, device, seed) for seed, arg in enumerate(example.args)]


def filled(arg: Any, scheme: QuantScheme | None, device: torch.device, seed: int) -> Any:
    if isinstance(arg, QuantizedWeight):
        plain = torch.empty(arg.tensor.shape, dtype=arg.dtype, device="meta")
        return quant_linear.pack(real(plain, device, seed), scheme=scheme)
    return real(arg, device, seed) if isinstance(arg, Tensor) else arg


def outcome(fn: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    """Call fn and return its results and its arguments, which it may write."""
    return tensors(fn(*args), args)


def tensors(result: Any, args: list[Any]) -> list[Tensor]:
    """Return copies of all results, tokens in fp32, and of all arguments."""
    single = isinstance(result, Tensor | QuantizedActivations)
    results = (result,) if single else result
    plain = [dequantize_tokens(r) if isinstance(r, QuantizedActivations) else r for r in results]
    return [t.clone() for t in (*plain, *args) if isinstance(t, Tensor)]


def replayed(fn: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    """The same through a captured graph, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fn(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn(*args)
    graph.replay()
    torch.cuda.synchronize()
    return tensors(result, args)


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    assert [t.dtype for t in got] == [t.dtype for t in want]
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True)]
    return max(float((g - w).norm() / w.norm().clamp(min=1e-30)) for g, w in pairs)


def truth(row: KernelRow) -> Callable[..., Any]:
    """Return what a row must agree with: its op's reference, of quantised layers the unpacking."""
    if row.pack is not None:
        return quant_linear.linear
    (found,) = (other.fn for other in CATALOGUE if other.op == row.op and other.reference)
    assert not isinstance(found, str)
    return found


def check(row: KernelRow, dtype: torch.dtype, example: Example, device: torch.device) -> bool:
    facts = {"device.arch": "sm80", **(device_facts(device) if device.type == "cuda" else {})}
    facts = {**facts, "rounding": "free", **example.facts}
    kernel = KernelTable().choose(row.op, device="cuda", dtype=dtype, **facts)
    assert kernel.row.name == row.name, kernel.row
    fn = kernel.fn
    want = outcome(truth(row), fill(example, device))
    worst = difference(outcome(fn, fill(example, device)), want)
    if device.type == "cuda":
        worst = max(worst, difference(replayed(fn, fill(example, device)), want))
    good = worst <= max(LIMIT[dtype], ROUNDED if row.op.endswith("_quant") else 0.0)
    name = f"{row.name} {example.label} {str(dtype).removeprefix('torch.')}"
    print(f"{name}: relative difference {worst:.1e}{'' if good else '  TOO LARGE'}")
    return good


def main(device: torch.device, names: list[str]) -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    results = [
        check(row, dtype, example, device)
        for row in CATALOGUE
        if isinstance(row.fn, str) and row.fn.startswith(PACKAGE)
        if not names or row.name in names
        for dtype in DTYPES
        for example in examples(row.name, dtype)
    ]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"), sys.argv[2:]))
