"""The op table: decisions, refusals, forced choices, third-party rows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from phyai.errors import ConfigError, KernelUnavailable
from phyai.kernels import (
    CATALOGUE,
    OPTIMIZED,
    REFERENCE,
    KernelRow,
    KernelTable,
    cpu,
    quant_norm,
    reference,
)

pytestmark = pytest.mark.usefixtures("without_native")


def fake(name: str) -> Callable[..., str]:
    return lambda *args: name


def row(name: str, **changes: Any) -> KernelRow:
    return KernelRow("silu", name, changes.pop("fn", fake(name)), **changes)


def test_every_catalogue_op_has_one_reference_of_its_own_name() -> None:
    assert {r.op for r in CATALOGUE if r.reference} == set(KernelTable().ops)
    for r in CATALOGUE:
        if r.reference:
            home = quant_norm if r.op.endswith("_quant") else reference
            assert r.fn is getattr(home, r.op)
            assert r.priority == REFERENCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_runs_everywhere(device: str, dtype: torch.dtype) -> None:
    table = KernelTable()
    for op in table.ops:
        assert callable(table.select(op, device=device, dtype=dtype))


@pytest.mark.parametrize(
    ("device", "dtype", "facts", "want"),
    [
        ("cpu", torch.float32, {}, cpu.sdpa_attention),
        ("cpu", torch.float32, {"rounding": "official"}, cpu.sdpa_attention),
        ("cpu", torch.bfloat16, {"rounding": "free"}, cpu.sdpa_attention),
        ("cuda:0", torch.bfloat16, {}, cpu.sdpa_attention),
        (torch.device("cuda", 1), torch.float16, {"rounding": "official"}, reference.attention),
    ],
)
def test_attention_choice(device: Any, dtype: Any, facts: dict[str, str], want: Any) -> None:
    assert KernelTable().select("attention", device=device, dtype=dtype, **facts) is want


def test_highest_fitting_priority_wins_and_ties_go_to_the_earlier_row() -> None:
    table = KernelTable()
    table.add([row("low", priority=1), row("high", priority=9), row("high2", priority=9)])
    assert table.select("silu", device="cpu", dtype="float32")() == "high"
    assert [r.name for r in table.rows("silu")] == ["high", "high2", "low", "torch.silu"]


def test_refusals_are_explained() -> None:
    table = KernelTable()
    table.add(
        [
            row("gpu", devices=("cuda",), priority=OPTIMIZED + 4),
            row("half", dtypes=("float16",), priority=OPTIMIZED + 3),
            row("wide", predicate=lambda f: f["width"] >= 64 or "width below 64", priority=299),
            row("mute", predicate=lambda f: False, priority=298),
            row("loud", capture_safe=False, priority=297),
        ]
    )
    fn = table.select("silu", device="cpu", dtype="float32", width=8, capture=True)
    assert fn is reference.silu
    (choice,) = table.choices
    assert choice.row == "torch.silu"
    assert dict(choice.refused) == {
        "gpu": "device cpu is not one of cuda",
        "half": "dtype float32 is not one of float16",
        "wide": "width below 64",
        "mute": "its predicate refused these facts",
        "loud": "cannot run inside a captured graph",
    }
    assert "silu -> torch.silu  [device=cpu, dtype=float32" in table.explain()
    assert "not wide: width below 64" in table.explain()
    assert table.select("silu", device="cpu", dtype="float32", width=64)() == "wide"


def test_predicate_that_misses_a_fact_refuses() -> None:
    table = KernelTable()
    table.add([row("picky", predicate=lambda f: f["width"] > 1)])
    assert table.select("silu", device="cpu", dtype="float32") is reference.silu
    assert dict(table.choices[0].refused) == {"picky": "needs to know the fact 'width'"}


def test_nothing_fits() -> None:
    with pytest.raises(KernelUnavailable, match=r"'silu'.*torch.silu: dtype int8 is not one of"):
        KernelTable().select("silu", device="cpu", dtype=torch.int8)


def test_unknown_op_suggests() -> None:
    with pytest.raises(KernelUnavailable, match=r"got 'rmsnorm'. Did you mean 'rms_norm'\?"):
        KernelTable().select("rmsnorm", device="cpu", dtype="float32")


def test_decisions_are_logged_once_and_previews_not_at_all() -> None:
    table = KernelTable()
    for _ in range(3):
        table.select("silu", device="cpu", dtype="float32")
    assert table.explain_one("rms_norm", device="cpu", dtype="bfloat16").row == "torch.rms_norm"
    assert table.explain_one("silu", device="cpu", dtype="int8").row is None
    assert [choice.op for choice in table.choices] == ["silu"]


def test_forced_choice_has_no_fallback() -> None:
    force = {"attention": "eager.attention"}
    table = KernelTable(force=force)
    assert table.select("attention", device="cpu", dtype="float32") is reference.attention
    table = KernelTable(force={"attention": "sdpa.attention"})
    with pytest.raises(KernelUnavailable, match=r"needs rounding='free'.*Remove the forced choice"):
        table.select("attention", device="cpu", dtype="bfloat16")


@pytest.mark.parametrize(
    ("force", "message"),
    [
        ({"attn": "x"}, "known op; got 'attn'"),
        ({"attention": "spda.attention"}, "Did you mean 'sdpa.attention'"),
    ],
)
def test_forced_choice_is_checked_even_for_another_op(force: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KernelTable(force=force).select("silu", device="cpu", dtype="float32")


def test_forced_row_may_come_from_a_hook() -> None:
    table = KernelTable(force={"silu": "mine"})
    table.add([row("mine", priority=-1)])
    assert table.select("silu", device="cpu", dtype="float32")() == "mine"


def test_add_is_all_or_nothing() -> None:
    table = KernelTable()
    before = table.rows("silu")
    table.add(None)
    with pytest.raises(ConfigError, match="unique within op 'silu'"):
        table.add([row("new"), row("torch.silu")])
    with pytest.raises(ConfigError, match="'silu' must have exactly one reference row"):
        table.add([row("new", reference=True)])
    with pytest.raises(
        ConfigError, match="'swish' must have exactly one reference row; got \\[\\]"
    ):
        table.add([KernelRow("swish", "mine.swish", fake("x"))])
    assert table.rows("silu") == before
    assert "swish" not in table.ops


def test_tables_share_nothing() -> None:
    one, other = KernelTable(), KernelTable()
    one.add([row("mine", priority=OPTIMIZED)])
    assert other.select("silu", device="cpu", dtype="float32") is reference.silu


def test_a_row_by_name_is_imported_when_chosen() -> None:
    table = KernelTable()
    table.add(
        [row("json", fn="json:dumps", priority=1), row("gone", fn="no_such_pkg:f", priority=2)]
    )
    fn = table.select("silu", device="cpu", dtype="float32")
    assert fn({}) == "{}"
    assert "No module named 'no_such_pkg'" in dict(table.choices[0].refused)["gone"]


def test_the_catalogue_imports_no_backend_library() -> None:
    code = (
        "import sys, phyai.kernels; phyai.kernels.KernelTable();"
        "print([m for m in ('triton', 'flashinfer', 'torch._dynamo', 'torch._inductor')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
