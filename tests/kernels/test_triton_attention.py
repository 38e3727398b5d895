"""Split-key attention in Triton, chosen by dispatch, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import MASK_VALUE, KernelTable, reference
from phyai.kernels.triton import attention as module
from phyai.kernels.triton.launch import assume
from tests.kernels.triton_parity import DTYPES, TOLERANCE, chosen, draw

# rows, tokens, heads, kv heads, head dim, keys
SHAPES = ((1, 2, 8, 1, 256, 37), (2, 3, 2, 2, 72, 131), (1, 1, 2, 2, 64, 1))


def qkv(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """k and v are the first keys of a longer cache."""
    rows, tokens, heads, kv_heads, dim, keys = shape
    cache = draw(2, rows, keys + 9, kv_heads, dim, dtype=dtype)[:, :, :keys]
    return draw(rows, tokens, heads, dim, dtype=dtype), cache[0], cache[1]


def run(dtype: torch.dtype, *args: Any, arch: int = 90) -> Tensor:
    dim, tokens = args[0].shape[3], args[0].shape[1]
    fn = chosen("attention", dtype, arch, head_dim=dim, queries=tokens, masked=True)
    with assume(arch):
        out: Tensor = fn(*args)
    assert out.dtype == dtype
    return out


def close(got: Tensor, *args: Any) -> None:
    """Against the reference in float64: the row keeps more bits than the reference in 16."""
    exact = reference.attention(*(a.double() if a.is_floating_point() else a for a in args[:3]),
                                *args[3:])  # fmt: skip
    tol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double(), exact.double(), rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_parity(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    args = (*qkv(shape, dtype), shape[4] ** -0.5)
    close(run(dtype, *args), *args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # hidden scores, as meant
def test_masks(dtype: torch.dtype) -> None:
    keys = 45 if dtype == torch.float32 else 131  # its tiles are smaller
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(2, keys, generator=generator) < 0.4
    mask[1, : 3 * keys // 4] = False  # a whole part of the keys is hidden
    mask[1, -1] = True
    bias = draw(1, 2, 1, keys, seed=5)
    bias[..., 7] = -torch.inf
    bias[..., 9] = MASK_VALUE
    args = (*qkv((2, 3, 2, 1, 72, keys), dtype), 0.2)
    for masks in ((mask,), (None, bias), (mask, bias)):
        close(run(dtype, *args, *masks), *args, *masks)


def test_nobody_to_look_at_is_the_average() -> None:
    q, k, v = qkv((2, 1, 2, 1, 64, 70), torch.float32)
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[1, 3] = True
    got = run(torch.float32, q, k, v, 0.125, mask)
    torch.testing.assert_close(got[0], v[0].mean(0).expand(1, 2, 64), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], v[1, 3].expand(1, 2, 64), rtol=1e-5, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = qkv((1, 2, 2, 1, 64, 70), torch.float32)
    args = (q * 300, k * 300, v, 1.0)
    got = run(torch.float32, *args)
    assert torch.isfinite(got).all()
    close(got, *args)


@pytest.mark.parametrize("arch", [80, 120])
def test_other_architectures(arch: int) -> None:
    for shape in SHAPES[:1]:
        args = (*qkv(shape, torch.float16), 0.1)
        close(run(torch.float16, *args, arch=arch), *args)


def test_a_row_does_not_depend_on_its_batch() -> None:
    q, k, v = qkv((3, 2, 4, 1, 64, 131), torch.float16)
    together = run(torch.float16, q, k, v, 0.125)
    alone = run(torch.float16, q[1:2], k[1:2], v[1:2], 0.125)
    assert torch.equal(together[1:2], alone)


def test_keys_are_split_into_whole_parts() -> None:
    for keys in (1, 63, 64, 65, 1018, 5000):
        for programs in (1, 7, 500):
            part = module._split(keys, 64, programs, 132)
            assert part % 64 == 0
            splits = -(-keys // part)
            assert (splits - 1) * part < keys  # no part is empty
            assert splits == 1 or splits <= -(-132 // programs)
    assert module._split(1018, 32, 7, 132) == 64  # the released shape fills the GPU


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"queries": 129}, "at most 128 queries; got 129"),
        ({"head_dim": 192}, "64 to 128, or 256; got 192"),
        ({"head_dim": 16}, "64 to 128, or 256; got 16"),
        ({"rounding": "official"}, "needs rounding='free'"),
        ({"device.arch": "sm75"}, "needs sm80"),
    ],
)
def test_dispatch_falls_back(facts: dict[str, Any], why: str) -> None:
    facts = {"head_dim": 64, "queries": 8, "device.arch": "sm90", **facts}
    choice = KernelTable().explain_one("attention", device="cuda", dtype="bfloat16", **facts)
    assert choice.row in ("sdpa.attention", "eager.attention")
    assert why in dict(choice.refused)["triton.attention"]


def test_without_a_query_length_torch_decides() -> None:
    facts = {"head_dim": 64, "device.arch": "sm90"}
    choice = KernelTable().explain_one("attention", device="cuda", dtype="bfloat16", **facts)
    assert choice.row == "sdpa.attention"


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = qkv((1, 2, 4, 2, 64, 5), torch.float32)
    for bad in ((q, k, v[:, :4]), (q[:, :, :3], k, v), (q, k[:, :0], v[:, :0])):
        with pytest.raises(ConfigError, match="attention"):
            run(torch.float32, *bad, 1.0)
