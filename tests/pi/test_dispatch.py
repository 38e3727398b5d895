"""Which kernel each layer of pi0.5 gets at its released width, here and on GPUs that are not here.

The layers are really built (their parameters are never touched, so they cost no memory); what they
ask for is asked again as another machine would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig
from phyai.kernel_setup import apply_policy
from phyai.kernels import Candidate, Kernel, KernelTable, cpu, onednn
from phyai.layers import Linear, Placement, VisionConfig
from phyai.layers.vision import VisionLayer
from phyai.models.pi.config import PiConfig
from phyai.models.pi.network.gemma import AdaptiveNorm, DecoderLayer, PlainNorm
from phyai.models.pi.network.segment import Segment

BF16, F32 = torch.bfloat16, torch.float32
NORMS = ("rms_norm", "add_rms_norm", "ada_rms_norm", "gated_ada_rms_norm", "layer_norm",
         "add_layer_norm")  # fmt: skip


class Listening(KernelTable):
    """A table that keeps what layers ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def choose(self, op: str, **facts: Any) -> Kernel:
        self.asked.append((op, facts))
        return super().choose(op, **facts)


def build(at: Placement) -> dict[str, torch.nn.Module]:
    """Return one layer of each kind at the released width."""
    pi = PiConfig.default("pi05")
    vision, text, expert = pi.vision, pi.text, pi.expert
    sizes = VisionConfig(
        vision.hidden_size,
        1,
        vision.num_attention_heads,
        vision.intermediate_size,
        vision.patch_size,
        vision.image_size,
    )
    stack = at.with_role("expert", pi.chunk_size)
    Segment("suffix", 0, pi.chunk_size, expert, stack, F32)
    return {
        "vision": VisionLayer("v", sizes, at.with_role("vision")),
        "prefix": DecoderLayer("t", text, at.with_role("prefix"), PlainNorm, split_kv=True),
        "expert": DecoderLayer("e", expert, stack, AdaptiveNorm),
        "head": Linear("h", pi.max_action_dim, expert.hidden_size, at.with_dtype(F32), bias=True),
    }


@pytest.fixture(scope="module")
def asked() -> list[tuple[str, dict[str, Any]]]:
    table = Listening()
    build(Placement(table, torch.device("cpu"), BF16, rounding="free"))
    return table.asked


def linears(modules: dict[str, torch.nn.Module]) -> dict[str, str]:
    return {
        f"{kind}.{name}": module.kernel
        for kind, layer in modules.items()
        for name, module in layer.named_modules()
        if isinstance(module, Linear)
    }


def rows_of(asked: list[tuple[str, dict[str, Any]]], **changes: Any) -> dict[str, set[str | None]]:
    """Return the rows each op would get where the facts are changed like this."""
    table = KernelTable(context=changes.pop("context", {}))
    found: dict[str, set[str | None]] = {}
    for op, facts in asked:
        choice = table.explain_one(op, **{**facts, **changes})
        found.setdefault(op, set()).add(choice.row)
    return found


def test_layers_on_this_machine(asked: list[tuple[str, dict[str, Any]]]) -> None:
    chosen = linears(build(Placement(KernelTable(), torch.device("cpu"), BF16, rounding="free")))
    layers = {name for name in chosen if name.startswith(("vision", "prefix", "expert"))}
    packing = {"native.linear", "onednn.linear", "onednn.linear_fused"}
    assert {chosen[name] for name in layers} <= packing, chosen
    rows = rows_of(asked)
    for op in (*NORMS, "rope_kv_write", "attention"):
        assert all(str(row).startswith("native.") for row in rows[op]), (op, rows[op])


def test_without_a_compiler(
    asked: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phyai.kernels.native.available", lambda: "no C++ compiler")
    monkeypatch.setattr(onednn, "bfloat16_on_this_cpu", lambda: True)
    monkeypatch.setattr(cpu, "has_16_bit_arithmetic", lambda: True)
    rows = rows_of(asked)
    assert rows["linear"] == {"onednn.linear", "onednn.linear_fused"}
    assert all("native" not in str(row) for found in rows.values() for row in found)


def test_without_a_compiler_and_without_16_bit_arithmetic(
    asked: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phyai.kernels.native.available", lambda: "no C++ compiler")
    monkeypatch.setattr(onednn, "bfloat16_on_this_cpu", lambda: False)
    monkeypatch.setattr(cpu, "has_16_bit_arithmetic", lambda: False)
    assert rows_of(asked, dtype=BF16)["linear"] == {"upcast.linear"}
    assert rows_of(asked, dtype=F32)["linear"] <= {"onednn.linear", "onednn.linear_fused"}


@pytest.mark.parametrize("winner", ["native", "other"])
def test_matrix_units_run_what_was_measured_to_be_faster(
    asked: list[tuple[str, dict[str, Any]]],
    winner: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phyai.kernels.native.available", lambda: True)
    monkeypatch.setattr(onednn, "bfloat16_on_this_cpu", lambda: True)
    monkeypatch.setattr(cpu, "has_16_bit_arithmetic", lambda: True)

    def cost(candidate: Candidate) -> float:
        native = candidate.kernel.startswith("native.")
        return 1.0 if native == (winner == "native") else 2.0

    config = EngineConfig(
        device=DeviceConfig(target="cpu"),
        kernel=KernelConfig(autotune_cache=str(tmp_path / "costs.json"), benchmark=cost),
    )
    table = KernelTable(context={"device.type": "cpu"})
    apply_policy(table, config)
    table_facts = [(op, {**facts, "dtype": BF16}) for op, facts in asked]
    for op, facts in table_facts:
        table.select(op, **facts)  # measures
    rows = {
        (op, facts.get("role")): str(table.explain_one(op, **facts).row)
        for op, facts in table_facts
        if op in ("linear", "attention") and facts.get("role") in ("prefix", "expert")
    }
    assert len(rows) >= 3
    assert {row.startswith("native.") for row in rows.values()} == {winner == "native"}


@pytest.mark.parametrize("arch", ["sm80", "sm87", "sm89", "sm90", "sm100", "sm110", "sm120"])
def test_layers_on_a_gpu(asked: list[tuple[str, dict[str, Any]]], arch: str) -> None:
    rows = rows_of(asked, device="cuda", context={"device.arch": arch})
    for op in (*NORMS, "rope_kv_write"):
        assert rows[op] == {f"triton.{op}"}, (op, rows[op])
    assert "triton.attention" in rows["attention"]
    assert rows["linear"] == {"torch.linear"}
    # no row fuses what follows a product there: it is asked for as an op of its own
    table = KernelTable(context={"device.arch": arch})
    epilogues = {str(facts["epilogue"]) for op, facts in asked if op == "linear"}
    assert epilogues == {"none", "gelu_tanh", "gelu_tanh_mul"}
    after = table.explain_one("gelu_tanh_mul", device="cuda", dtype=BF16)
    assert after.row == "triton.gelu_tanh_mul"
