"""CPU rows of the op table against the reference."""

from __future__ import annotations

import pytest
import torch

from phyai.kernels import KernelTable, cpu, reference


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
