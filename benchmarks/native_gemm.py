"""Time of packed linear layers in C++, bf16 and int8, next to torch's, shape by shape.

Prints GFLOP/s (median, min .. max) of each, and 16-bit weights passed per second (int8 reads half).
The candidates alternate, so that a busy machine hurts all of them alike. ``--cpu-time`` counts the
time of one thread on its core instead of the clock, for a machine that others use too.

    python benchmarks/native_gemm.py --threads 2 --repeats 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from phyai.kernels import reference
from phyai.kernels.cpu import upcast_linear
from phyai.kernels.native.linear import linear, pack
from phyai.kernels.native.quant_linear import WEIGHT, linear_int8, pack_int8
from phyai.kernels.policy_quant import QuantScheme, TensorQuant

# (rows, K, N, epilogue): solver loop, prefix, vision
SHAPES = (
    (50, 1024, 2560, "none"),
    (50, 2048, 1024, "none"),
    (50, 1024, 8192, "gelu_tanh_mul"),
    (50, 4096, 1024, "none"),
    (100, 1024, 8192, "gelu_tanh_mul"),
    (400, 1024, 8192, "gelu_tanh_mul"),
    (968, 2048, 2560, "none"),
    (968, 2048, 2048, "none"),
    (532, 2048, 32768, "gelu_tanh_mul"),
    (532, 16384, 2048, "none"),
    (768, 1152, 3456, "none"),
    (768, 1152, 1152, "none"),
    (768, 1152, 4304, "gelu_tanh"),
    (768, 4304, 1152, "none"),
    (1, 1024, 3072, "none"),
    (1, 2048, 16384, "none"),
    (3, 2048, 16384, "none"),
)
OWN = ("ours", "int8", "int8-weight")
INT8 = QuantScheme(WEIGHT, TensorQuant("int8", "per_channel", dynamic=True))


def candidates(
    rows: int, k: int, n: int, epilogue: str, slow: bool
) -> dict[str, Callable[[], Tensor]]:
    """Return the ways to compute one layer; all take a bf16 input but oneDNN's fp32 one."""
    x = torch.randn(rows, k).bfloat16()
    weight = (torch.randn(n, k) / k**0.5).bfloat16()
    packed = pack(weight, interleave=epilogue.endswith("_mul"))
    rounded, int8 = pack_int8(weight, epilogue, INT8), pack_int8(weight, epilogue)
    activation = (lambda y: y) if epilogue == "none" else getattr(reference, epilogue)
    wide, prepacked = x.float(), torch.ops.mkldnn._reorder_linear_weight(weight.float(), rows)
    product = torch.ops.mkldnn._linear_pointwise
    found: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: linear(x, packed, None, epilogue),
        "int8": lambda: linear_int8(x, rounded, None, epilogue),
        "int8-weight": lambda: linear_int8(x, int8, None, epilogue),
        "onednn-fp32": lambda: activation(product(wide, prepacked, None, "none", [], "")),
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        half = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        found["onednn-bf16"] = lambda: activation(product(x, half, None, "none", [], ""))
    if slow:
        found["upcast"] = lambda: activation(upcast_linear(x, weight))
    return found


def main() -> None:
    """Print one line per shape and candidate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rows", type=int, help="only shapes with so many rows")
    parser.add_argument("--own", action="store_true", help="our kernels only")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, time on its core")
    parser.add_argument("--slow", action="store_true", help="also the upcast of every call")
    options = parser.parse_args()
    torch.set_num_threads(1 if options.cpu_time else options.threads)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    for rows, k, n, epilogue in SHAPES:
        if options.rows not in (None, rows):
            continue
        runs = candidates(rows, k, n, epilogue, options.slow)
        if options.own:
            runs = {name: run for name, run in runs.items() if name in OWN}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(options.repeats + 2):
            for name, run in runs.items():
                start = clock()
                run()
                if repeat >= 2:  # the first two warm caches and threads up
                    seconds[name].append(clock() - start)
        print(f"[{rows}, {k}] x [{n}, {k}] {epilogue}")
        for name, took in seconds.items():
            rates = [2e-9 * rows * k * n / s for s in took]
            middle = statistics.median(took)
            print(
                f"  {name:<12} {statistics.median(rates):6.1f} GFLOP/s "
                f"({min(rates):.1f} .. {max(rates):.1f})  {1e3 * middle:8.3f} ms"
                f"  {2e-9 * k * n / middle:5.1f} GB/s"
            )


if __name__ == "__main__":
    main()
