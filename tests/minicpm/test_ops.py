"""Short convolution, gated norm, the rows of all ops; Triton kernels under the interpreter."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import aot
from phyai.models.minicpm_robot import ops
from phyai.models.minicpm_robot.ops import cpu, reference
from phyai.models.minicpm_robot.ops.examples import examples
from tests.kernels.triton_parity import DTYPES, close, draw
from tests.minicpm.text_setup import table
from tests.source_rules import MODEL_TREES, kernel_modules, kernel_problems, modules

CONVS = pytest.mark.parametrize("conv", [reference.short_conv, cpu.short_conv])


def chosen(op: str, dtype: torch.dtype, **facts: Any) -> Callable[..., Any]:
    """Return what dispatch picks on a GPU; must be a Triton row."""
    made = table()
    fn = made.select(op, device="cuda", dtype=dtype, **{"device.arch": "sm90"}, **facts)
    assert made.choices[-1].row == f"triton.{op}", made.explain()
    return fn


# ---------------------------------------------------------------- rows


def test_rows() -> None:
    rows = ops.kernel_rows()
    for op in (ops.DELTA, ops.CONV, ops.NORM):
        mine = [row for row in rows if row.op == op]
        assert sum(row.reference for row in mine) == 1
        assert all(row.capture_safe for row in mine)
    for row in rows:
        module, _, name = str(row.fn).partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_what_a_cpu_and_a_gpu_get() -> None:
    made = table()
    facts = {
        ops.DELTA: {"key_dim": 128, "value_dim": 128},
        ops.CONV: {"width": 6144, "taps": 4},
        ops.NORM: {"width": 128},
    }
    cpu_rows = {"gated_delta_rule": "chunked", "short_conv": "blocks", "gated_rms_norm": "torch"}
    for op, given in facts.items():
        here = made.explain_one(op, device="cpu", dtype="bfloat16", **given)
        assert here.row == f"{cpu_rows[op]}.{op}"
        for arch, kind in ((90, "triton"), (70, "chunked" if op == ops.DELTA else "torch")):
            there = made.explain_one(
                op, device="cuda", dtype="bfloat16", **{"device.arch": f"sm{arch}"}, **given
            )
            assert there.row == f"{kind}.{op}"
    wide = made.explain_one(
        ops.DELTA, device="cuda", dtype="float32", key_dim=512, **{"device.arch": "sm90"}
    )
    assert wide.row == "chunked.gated_delta_rule"


def test_every_kernel_file_is_named_by_a_row() -> None:
    own = [tree for tree in MODEL_TREES if "minicpm" in tree.parent.name]
    trees = [m for m in modules(own[0]) if ".minicpm_robot." in m.name]
    assert len(kernel_modules(trees)) == 3
    named = [row.fn for row in ops.kernel_rows()]
    assert kernel_problems(trees, named) == []


def test_the_ahead_of_time_check_covers_the_rows() -> None:
    source = "phyai.models.minicpm_robot.ops.examples"
    found = {task.row for task in aot.tasks([90], ["bfloat16"], [source]) if task.source}
    triton = {row.name for row in ops.kernel_rows() if row.name.startswith("triton.")}
    assert triton <= found
    assert len(triton) == 3
    made = table()
    for row in triton:
        calls = examples(row, torch.bfloat16)
        assert len(calls) >= 2
        for call in calls:
            facts = {**call.facts, "device.arch": "sm90"}
            op = row.removeprefix("triton.")
            choice = made.explain_one(op, device="cuda", dtype="bfloat16", **facts)
            assert choice.row == row
    assert examples("torch.short_conv", torch.float32) == []


# ---------------------------------------------------------------- torch rows


@CONVS
@pytest.mark.parametrize("taps", [1, 2, 4, 7])
@pytest.mark.parametrize("tokens", [1, 3, 17, 40])
def test_convolution(conv: Callable[..., Tensor], tokens: int, taps: int) -> None:
    x, weight = draw(2, tokens, 10), draw(taps, 10)
    got = conv(x, weight)
    padded = torch.nn.functional.pad(x.double(), (0, 0, taps - 1, 0))
    want = sum(padded[:, j : j + tokens] * weight[j].double() for j in range(taps))
    close(got, torch.nn.functional.silu(torch.as_tensor(want)).float())
    at = tokens // 2
    late = conv(x[:, at:], weight, torch.cat([x.new_zeros(2, taps, 10), x[:, :at]], dim=1))
    close(late, got[:, at:])


@CONVS
def test_convolution_of_strided_rows_and_of_too_few_inputs(conv: Callable[..., Tensor]) -> None:
    joined, weight = draw(2, 20, 15), draw(4, 6)
    close(conv(joined[..., 3:9], weight), reference.short_conv(joined[..., 3:9].clone(), weight))
    with pytest.raises(ConfigError, match="must have 3 inputs in front; got 2"):
        conv(joined[..., :6], weight, draw(2, 2, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolution_rounds_before_the_activation(dtype: torch.dtype) -> None:
    x, weight = draw(1, 40, 8, dtype=dtype), draw(4, 8, dtype=dtype)
    got, want = cpu.short_conv(x, weight), reference.short_conv(x, weight)
    assert (got == want).float().mean() > 0.99  # a sum may fall on the other side of a tie
    close(got, want)


def test_gated_norm() -> None:
    x, z, weight = draw(3, 2, 8), draw(3, 2, 8, seed=1), draw(8, seed=2)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    want = (normed * z * torch.sigmoid(z.double())).float()
    close(reference.gated_rms_norm(x, z, weight, 1e-6), want)


# ---------------------------------------------------------------- Triton rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("taps", "held"), [(4, 0), (4, 4), (2, 3), (1, 0)])
def test_triton_convolution(taps: int, held: int, dtype: torch.dtype) -> None:
    x = draw(2, 19, 140, dtype=dtype)[..., 3:136]
    weight = draw(taps, 133, dtype=dtype)
    before = draw(2, held, 133, dtype=dtype, seed=5) if held else None
    got = chosen(ops.CONV, dtype, width=133, taps=taps)(x, weight, before)
    close(got, reference.short_conv(x, weight, before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 130])
def test_triton_gated_norm(width: int, dtype: torch.dtype) -> None:
    joined = draw(5, 3 * width + 7, dtype=dtype)
    x, z = draw(5, 3, width, dtype=dtype), joined[:, 5 : 5 + 3 * width].unflatten(1, (3, width))
    weight = draw(width)
    got = chosen(ops.NORM, dtype, width=width)(x, z, weight, 1e-6)
    close(got, reference.gated_rms_norm(x, z, weight, 1e-6))


@pytest.mark.parametrize(
    ("with_state", "dtype"), [(False, torch.float32), *((True, dtype) for dtype in DTYPES)]
)
def test_triton_gated_delta(with_state: bool, dtype: torch.dtype) -> None:
    rows, tokens, key_heads, heads, dim, width = 2, 3, 1, 2, 12, 20
    joined = draw(rows, tokens, 2 * key_heads * dim + heads * width + 3, dtype=dtype)
    q, k, v, _ = joined.split([key_heads * dim, key_heads * dim, heads * width, 3], dim=-1)
    q, k, v = q.unflatten(-1, (-1, dim)), k.unflatten(-1, (-1, dim)), v.unflatten(-1, (-1, width))
    g = -draw(rows, tokens, heads).abs()
    beta = draw(rows, tokens, heads, seed=1).sigmoid()
    state = draw(rows, heads, dim, width) if with_state else None
    op = chosen(ops.DELTA, dtype, key_dim=dim, value_dim=width)
    want, last = reference.gated_delta_rule(q, k, v, g, beta, state)
    got, mine = op(q, k, v, g, beta, state)
    close(got, want)
    close(mine, last)
    read, none = op(q, k, v, g, beta, state, False)
    assert none is None
    assert torch.equal(read, got)


def test_triton_shapes_that_do_not_fit_are_refused() -> None:
    x = draw(1, 3, 4)
    with pytest.raises(ConfigError, match="must have x's channels"):
        chosen(ops.CONV, torch.float32, width=4, taps=2)(x, draw(2, 5))
    with pytest.raises(ConfigError, match="must fill the taps"):
        chosen(ops.CONV, torch.float32, width=4, taps=4)(x, draw(4, 4), draw(1, 2, 4))
    with pytest.raises(ConfigError, match="must have one shape"):
        chosen(ops.NORM, torch.float32, width=4)(x, draw(1, 2, 4), draw(4), 1e-6)
    heads = draw(1, 3, 2, 4)
    op = chosen(ops.DELTA, torch.float32, key_dim=4, value_dim=4)
    with pytest.raises(ConfigError, match="one value per token and head"):
        op(heads, heads, heads, draw(1, 3, 2), draw(1, 3, 1))


@pytest.mark.slow
def test_importing_the_rows_imports_no_triton() -> None:
    code = "import sys, phyai.models.minicpm_robot.ops.examples as e; e.kernel_rows(); "
    code += "assert not any(name.partition('.')[0] == 'triton' for name in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
