"""What this machine reaches at best: a matrix product per dtype and a stream of bytes, measured."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from phyai.errors import ConfigError
from phyai.profile.roofline import Machine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REPEATS = 5
LEAST_S = 0.05
SIZES = (512, 1024, 2048, 4096, 8192)
STREAM_BYTES = 2**28  # larger than any cache


def probe(device: torch.device, dtypes: Sequence[str] = ("float32", "bfloat16")) -> list[Machine]:
    """Return the best of some passes per dtype; takes seconds.

    Operations: square matrix products, doubled until one pass takes 50 ms. Bytes: a matrix read
    once by a product with a vector, as weights are read at small batch; float32.
    """
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise ConfigError(
            f"probe dtype must be one of {', '.join(sorted(DTYPES))}; got {unknown[0]!r}."
        )
    name, bytes_per_s = describe(device), stream_bytes_per_s(device)
    return [
        Machine(name, dtype, product_flops_per_s(device, DTYPES[dtype]), bytes_per_s)
        for dtype in dtypes
    ]


def product_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return operations per second of a large square matrix product."""
    best = 0.0
    for size in SIZES:
        a, b = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
        seconds = _best_s(lambda a=a, b=b: torch.mm(a, b), device, LEAST_S)  # type: ignore[misc]
        best = max(best, 2 * size**3 / seconds)
        if seconds >= LEAST_S:
            break
    return best


def stream_bytes_per_s(device: torch.device, size: int = STREAM_BYTES) -> float:
    """Return bytes per second at which a large matrix is read."""
    columns = 4096
    matrix = torch.ones(size // (4 * columns), columns, device=device)
    vector = torch.ones(columns, device=device)
    seconds = _best_s(lambda: torch.mv(matrix, vector), device, LEAST_S)
    return matrix.numel() * 4 / seconds


def describe(device: torch.device) -> str:
    """Return the name of the device and, for a CPU, how many threads torch uses."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    unit = torch.backends.cpu.get_cpu_capability()
    return f"{_cpu_name()}, {unit}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _best_s(run: Callable[[], object], device: torch.device, long_s: float) -> float:
    """Return the shortest of some passes, fewer when one pass is long."""
    run()
    best = float("inf")
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - began)
        if best > 10 * long_s:
            break
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
