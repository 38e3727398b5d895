"""Time of the gated delta rule in chunks next to the same rule token by token.

Both sides get the same tensors and alternate in one process, so that a busy machine hurts both
alike; before that their results are compared. Prints milliseconds (median, min .. max) and the
ratio of each pair (median, min .. max).

    python benchmarks/gated_delta.py --tokens 512 --repeats 7
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from torch import Tensor

from phyai.models.minicpm_robot.ops import chunked, reference

# name: key heads, value heads, key dim, value dim
SIZES = {"released": (16, 16, 128, 128), "tiny": (2, 2, 16, 16)}
ATOL = 2e-5


def inputs(sizes: tuple[int, int, int, int], tokens: int) -> list[Tensor]:
    """Return q, k, v, g and beta of one row."""
    keys, values, dim, width = sizes
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, tokens, keys, dim)
    v = torch.randn(1, tokens, values, width)
    gates = torch.randn(2, 1, tokens, values)
    return [q, k, v, -torch.nn.functional.softplus(gates[0]), gates[1].sigmoid()]


def difference(given: list[Tensor]) -> float:
    """Return the largest difference of results and states."""
    pairs = zip(chunked.gated_delta_rule(*given), reference.gated_delta_rule(*given), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} ({min(values):.2f} .. {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, action="append", help="lengths; default 512")
    parser.add_argument("--repeats", type=int, default=7, help="pairs that count, at least 5")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    repeats, wrong = max(options.repeats, 5), False
    for name, sizes in SIZES.items():
        for tokens in options.tokens or [512]:
            given = inputs(sizes, tokens)
            off = difference(given)
            wrong |= off > ATOL
            sides = {"chunks": chunked.gated_delta_rule, "steps": reference.gated_delta_rule}
            took: dict[str, list[float]] = {side: [] for side in sides}
            for repeat in range(repeats + 1):
                for side, run in sides.items():
                    start = time.perf_counter()
                    run(*given)
                    if repeat:  # the first pair warms up
                        took[side].append(1e3 * (time.perf_counter() - start))
            ratios = [slow / fast for fast, slow in zip(*took.values(), strict=True)]
            print(f"{name}: {tokens} tokens, heads {sizes[0]}/{sizes[1]} x {sizes[2]}/{sizes[3]}")
            for side, times in took.items():
                print(f"  {side:<8}{spread(times)} ms")
            print(f"  ratio   {spread(ratios)}  largest difference {off:.1e} (limit {ATOL:.0e})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
