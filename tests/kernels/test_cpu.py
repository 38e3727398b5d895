"""CPU rows of the op table against the reference."""

from __future__ import annotations

import pytest
import torch

from phyai.kernels import KernelTable, cpu, reference

pytestmark = pytest.mark.usefixtures("without_native")


@pytest.mark.parametrize("shape", [(3, 17), (2, 5, 17), (1, 1, 17)])
@pytest.mark.parametrize("block", [1, 40, 2**22])
@pytest.mark.parametrize("with_bias", [False, True])
def test_upcast_linear_rounds_once(
    shape: tuple[int, ...], block: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of weight rows at a time, also when they do not divide evenly."""
    monkeypatch.setattr(cpu, "_BLOCK", block)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).bfloat16()
    weight = torch.randn(7, 17, generator=generator).bfloat16()
    bias = torch.randn(7, generator=generator).bfloat16() if with_bias else None
    out = cpu.upcast_linear(x, weight, bias)
    wide = None if bias is None else bias.double()
    exact = reference.linear(x.double(), weight.double(), wide)
    assert out.dtype == torch.bfloat16
    assert out.shape == (*shape[:-1], 7)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_upcast_attention_rounds_like_the_reference(kv_heads: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 5, 4, 16, generator=generator).bfloat16()
    k, v = torch.randn(2, 2, 9, kv_heads, 16, generator=generator).bfloat16().unbind(0)
    mask = torch.rand(2, 9, generator=generator) < 0.7 if masked else None
    out = cpu.upcast_attention(q, k, v, 0.25, key_mask=mask)
    want = reference.attention(q, k, v, 0.25, key_mask=mask)
    # products accumulate in another order: now and then one bf16 step before the softmax
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want.float(), rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize(
    ("unit", "rounding", "row"),
    [
        ("AVX2", "official", "upcast.attention"),
        ("AVX512", "official", "eager.attention"),
        ("AVX2", "free", "sdpa.attention"),
    ],
)
def test_attention_row_follows_the_vector_unit(
    unit: str, rounding: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: unit)
    table = KernelTable()
    chosen = table.explain_one("attention", device="cpu", dtype="bfloat16", rounding=rounding)
    assert chosen.row == row


@pytest.mark.parametrize(
    ("unit", "row"),
    [("AVX2", "upcast.linear"), ("DEFAULT", "upcast.linear"), ("AVX512", "torch.linear")],
)
def test_linear_row_follows_the_vector_unit(
    unit: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: unit)
    table = KernelTable()
    assert table.explain_one("linear", device="cpu", dtype="bfloat16").row == row
    assert table.explain_one("linear", device="cpu", dtype="float32").row == "torch.linear"
    assert table.explain_one("linear", device="cuda", dtype="bfloat16").row == "torch.linear"
