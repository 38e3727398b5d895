"""The rows of an optional package: when dispatch takes them, and what they hand to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from phyai.errors import ConfigError
from phyai.kernels import KernelTable, flashinfer, reference
from phyai.kernels.flashinfer_rows import FLASHINFER_ROWS

NAMES = {row.name for row in FLASHINFER_ROWS}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """A stand-in for the package that computes with torch; returns what it was called with."""
    calls: list[dict[str, Any]] = []
    root, norm, prefill = (ModuleType(f"flashinfer{end}") for end in ("", ".norm", ".prefill"))

    def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        calls.append({"shape": tuple(input.shape), "dtype": weight.dtype, "eps": eps})
        assert input.dim() == 2
        assert input.is_contiguous()
        assert weight.dtype == input.dtype
        return torch.nn.functional.rms_norm(input, weight.shape, weight, eps)

    def single_prefill_with_kv_cache(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, kv_layout: str, sm_scale: float,
        backend: str,
    ) -> Tensor:  # fmt: skip
        calls.append({"causal": causal, "layout": kv_layout, "backend": backend})
        assert (q.dim(), k.dim()) == (3, 3)
        return reference.attention(q[None], k[None], v[None], sm_scale)[0]

    norm.rmsnorm = rmsnorm  # type: ignore[attr-defined]
    prefill.single_prefill_with_kv_cache = single_prefill_with_kv_cache  # type: ignore[attr-defined]
    for module in (root, norm, prefill):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    flashinfer._module.cache_clear()
    yield calls
    flashinfer._module.cache_clear()


def test_importing_the_rows_imports_no_package() -> None:
    assert "flashinfer" not in sys.modules


def table(**context: Any) -> KernelTable:
    facts = {"device.type": "cuda", "device.arch": "sm90", "lib.flashinfer": "0.6.1", **context}
    made = KernelTable(context={name: value for name, value in facts.items() if value})
    there = {row.name for op in made.ops for row in made.rows(op)}
    made.add(row for row in FLASHINFER_ROWS if row.name not in there)
    return made


def decide(op: str, made: KernelTable, **facts: Any) -> Any:
    known = {"dtype": "bfloat16", "head_dim": 128, "queries": 800, "masked": False, "width": 9000}
    return made.explain_one(op, device="cuda", **{**known, **facts})


def test_dispatch_takes_them_where_our_own_kernels_end() -> None:
    assert decide("attention", table()).row == "flashinfer.attention"
    assert decide("attention", table(), queries=50).row == "triton.attention"
    assert decide("rms_norm", table()).row == "flashinfer.rms_norm"  # wider than Triton's rows
    assert decide("rms_norm", table(), width=2048).row == "triton.rms_norm"


@pytest.mark.parametrize(
    ("op", "facts", "why"),
    [
        ("attention", {"masked": True}, "takes no mask"),
        ("attention", {"head_dim": 72}, "needs a head_dim of 64, 128, 256; got 72"),
        ("attention", {"rounding": "official"}, "needs rounding='free'"),
        ("attention", {"capture": True}, "cannot run inside a captured graph"),
        ("attention", {"dtype": "float32"}, "dtype float32 is not one of"),
        ("rms_norm", {"rounding": "official"}, "needs rounding='free'"),
    ],
)
def test_dispatch_refuses(op: str, facts: dict[str, Any], why: str) -> None:
    choice = decide(op, table(), **facts)
    assert choice.row not in NAMES
    assert why in dict(choice.refused)[f"flashinfer.{op}"]


def test_dispatch_refuses_without_the_package_and_on_old_gpus() -> None:
    without = decide("attention", table(**{"lib.flashinfer": None}))
    assert (
        "flashinfer-python, which is not installed" in dict(without.refused)["flashinfer.attention"]
    )
    old = decide("rms_norm", table(**{"device.arch": "sm75"}))
    assert "needs sm80 or newer" in dict(old.refused)["flashinfer.rms_norm"]


def test_rms_norm(package: list[dict[str, Any]]) -> None:
    x = torch.randn(2, 3, 8).bfloat16().transpose(0, 1)
    weight = torch.randn(8)
    for offset in (0.0, 1.0):
        got = flashinfer.rms_norm(x, weight, 1e-5, offset=offset)
        want = reference.rms_norm(x, weight, 1e-5, offset)
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)
    assert package == [{"shape": (6, 8), "dtype": torch.bfloat16, "eps": 1e-5}] * 2


def test_attention(package: list[dict[str, Any]]) -> None:
    q, k, v = torch.randn(2, 5, 4, 64), torch.randn(2, 9, 2, 64), torch.randn(2, 9, 2, 64)
    got = flashinfer.attention(q, k[:, :7], v[:, :7], 0.1, backend="fa2")
    torch.testing.assert_close(got, reference.attention(q, k[:, :7], v[:, :7], 0.1))
    assert package == [{"causal": False, "layout": "NHD", "backend": "fa2"}] * 2
    with pytest.raises(ConfigError, match="without key_mask"):
        flashinfer.attention(q, k, v, 0.1, torch.ones(2, 9, dtype=torch.bool))
