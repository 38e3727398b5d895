"""Causal attention: the reference against loops, the other rows against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import KernelTable, cpu, reference
from phyai.kernels.native import attention as native_attention
from tests.kernels.native_parity import compiles, draw, falls_through, needs_native, parity

DTYPES = (torch.float32, torch.bfloat16)
# rows, tokens, query heads, key/value heads, head dim; more tokens than one block, panel and vector
SHAPES = ((1, 1, 1, 1, 2), (2, 7, 6, 2, 10), (1, 70, 4, 2, 16), (2, 33, 3, 3, 24))


def heads(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views of one projection."""
    rows, tokens, query, kv, dim = shape
    joined = draw(rows, tokens, query + 2 * kv, dim, dtype=dtype)
    q, k, v = joined.split([query, kv, kv], dim=2)
    return q, k, v


@pytest.mark.parametrize("shape", SHAPES)
def test_a_query_sees_the_keys_up_to_itself(shape: tuple[int, ...]) -> None:
    q, k, v = (x.double() for x in heads(shape, torch.float32))
    group, scale = shape[2] // shape[3], shape[4] ** -0.5
    got = reference.causal_attention(q.float(), k.float(), v.float(), scale)
    for row, token, head in torch.cartesian_prod(*(torch.arange(n) for n in shape[:3])).tolist():
        keys, values = (x[row, : token + 1, head // group] for x in (k, v))
        want = torch.softmax(keys @ q[row, token, head] * scale, dim=0) @ values
        torch.testing.assert_close(got[row, token, head].double(), want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_row(shape: tuple[int, ...]) -> None:
    args = (*heads(shape, torch.float32), shape[4] ** -0.5)
    want = reference.causal_attention(*args)
    got = cpu.sdpa_causal_attention(*args)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 600, 2, 1, 8), (1, 156, 8, 4, 128)])
def test_the_native_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = heads(shape, dtype)
    # values near zero are sums that cancel
    atol = 1e-3 if dtype == torch.bfloat16 else None
    parity(native_attention.causal_attention, q, k, v, shape[4] ** -0.5, atol=atol)


@needs_native
def test_later_keys_are_not_read() -> None:
    q, k, v = heads((1, 40, 4, 2, 16), torch.float32)
    first = native_attention.causal_attention(q[:, :17], k[:, :17], v[:, :17], 0.25)
    v = v.clone()
    v[:, 17:] = 1e30
    whole = native_attention.causal_attention(q, k, v, 0.25)
    torch.testing.assert_close(whole[:, :17], first, rtol=1e-5, atol=1e-6)


@needs_native
def test_the_rest_goes_to_the_reference() -> None:
    q, k, v = (x.half() for x in heads((1, 5, 2, 1, 4), torch.float32))
    falls_through(native_attention.causal_attention, q, k, v, 0.5)
    none = draw(1, 0, 2, 4)
    assert native_attention.causal_attention(none, none, none, 1.0).shape == none.shape
    compiles(native_attention.causal_attention, *heads((1, 5, 2, 1, 4), torch.float32), 0.5)


def test_as_many_keys_as_queries() -> None:
    q, k = draw(1, 3, 2, 4), draw(1, 4, 2, 4)
    for row in KernelTable().rows("causal_attention"):
        fn = KernelTable(force={"causal_attention": row.name}).select(
            "causal_attention", device="cpu", dtype="float32"
        )
        with pytest.raises(ConfigError, match="as many keys as queries; got 4 and 3"):
            fn(q, k, k, 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_finds_a_row(dtype: str) -> None:
    table = KernelTable()
    facts = {"device.arch": "sm90", "head_dim": 128}
    table.select("causal_attention", device="cuda", dtype=dtype, **facts)
    assert table.choices[-1].row == "sdpa.causal_attention"
