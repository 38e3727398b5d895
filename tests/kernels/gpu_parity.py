"""Every Triton row at released sizes against the reference, also replayed from a CUDA graph.

Run by `test_triton_gpu.py` in a process without TRITON_INTERPRET; prints one line per call and
exits with 1 when one differs. ``python -m tests.kernels.gpu_parity [DEVICE [OPS]]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from phyai.kernels import KernelTable, reference
from phyai.kernels.facts import device_facts
from phyai.kernels.triton.examples import Example, examples
from phyai.kernels.triton_rows import TRITON_ROWS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative norm of the difference: the order of sums differs, and attention keeps more bits.
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


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
    return [
        real(arg, device, seed) if isinstance(arg, Tensor) else arg
        for seed, arg in enumerate(example.args)
    ]


def outcome(fn: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    """Call fn and return its results and its arguments, which it may write."""
    result = fn(*args)
    results = result if isinstance(result, tuple) else (result,)
    return [t.clone() for t in (*results, *args) if isinstance(t, Tensor)]


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
    results = result if isinstance(result, tuple) else (result,)
    return [t.clone() for t in (*results, *args) if isinstance(t, Tensor)]


def difference(got: list[Tensor], want: list[Tensor]) -> float:
    assert [t.dtype for t in got] == [t.dtype for t in want]
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True)]
    return max(float((g - w).norm() / w.norm().clamp(min=1e-30)) for g, w in pairs)


def check(op: str, dtype: torch.dtype, example: Example, device: torch.device) -> bool:
    facts = {"device.arch": "sm80", **(device_facts(device) if device.type == "cuda" else {})}
    facts = {**facts, "rounding": "free", **example.facts}
    fn = KernelTable().select(op, device="cuda", dtype=dtype, **facts)
    assert fn.__module__.startswith("phyai.kernels.triton."), fn
    want = outcome(getattr(reference, op), fill(example, device))
    worst = difference(outcome(fn, fill(example, device)), want)
    if device.type == "cuda":
        worst = max(worst, difference(replayed(fn, fill(example, device)), want))
    good = worst <= LIMIT[dtype]
    name = f"{op} {example.label} {str(dtype).removeprefix('torch.')}"
    print(f"{name}: relative difference {worst:.1e}{'' if good else '  TOO LARGE'}")
    return good


def main(device: torch.device, ops: list[str]) -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    results = [
        check(row.op, dtype, example, device)
        for row in TRITON_ROWS
        if not ops or row.op in ops
        for dtype in DTYPES
        for example in examples(row.op, dtype)
    ]
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1] if len(sys.argv) > 1 else "cuda"), sys.argv[2:]))
