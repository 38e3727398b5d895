"""`backends.*` of a config: which kernels a preference leads to, and what it cannot ask for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai.backends import with_backends
from phyai.engine_config import BackendConfig, EngineConfig, KernelConfig, RuntimeConfig
from phyai.errors import ConfigError
from phyai.kernel_setup import apply_policy
from phyai.kernels import KernelRow, KernelTable
from phyai.kernels.flashinfer_rows import FLASHINFER_ROWS
from tests.pi.tiny_requests import cpu_config, engine_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GPU_FACTS = {"device.type": "cuda", "device.arch": "sm90", "rounding": "free"}


def table_for(
    device: torch.device, kernel: KernelConfig | None = None, runtime: Any = None, **backends: Any
) -> KernelTable:
    """Return the table of an engine with these preferences."""
    context = {} if device.type == "cpu" else GPU_FACTS
    table = KernelTable(context={**context, "lib.flashinfer": "0.6"})
    names = {row.name for op in table.ops for row in table.rows(op)}
    table.add(row for row in FLASHINFER_ROWS if row.name not in names)
    config = EngineConfig(
        backends=BackendConfig(**backends),
        kernel=kernel or KernelConfig(),
        runtime=RuntimeConfig(**(runtime or {})),
    )
    apply_policy(table, with_backends(config, table, device))
    return table


def chosen(table: KernelTable, op: str, device: torch.device, dtype: str = "float32") -> str | None:
    facts = {"head_dim": 64, "queries": 512, "masked": False, "width": 64}
    return table.explain_one(op, device=device, dtype=dtype, **facts).row


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_defaults_leave_the_choice_to_the_table(device: torch.device) -> None:
    plain = KernelTable(context={} if device.type == "cpu" else GPU_FACTS)
    auto = EngineConfig.auto(device.type).backends
    for backends in (BackendConfig(), auto):
        config = EngineConfig(backends=backends)
        assert with_backends(config, plain, device) is config


def test_a_preference_beats_the_order_of_the_table() -> None:
    assert chosen(table_for(CPU, attn="eager"), "attention", CPU) == "eager.attention"
    linear = table_for(CPU, linear="torch")
    assert chosen(linear, "linear", CPU) == "torch.linear"
    assert (
        "backends.linear of linear"
        in linear.explain_one("linear", device="cpu", dtype="float32").by
    )
    norms = table_for(CUDA, norm="torch")
    assert chosen(norms, "rms_norm", CUDA) == "torch.rms_norm"
    assert chosen(norms, "ada_layer_norm", CUDA) == "torch.ada_layer_norm"
    own = table_for(CUDA, norm="phyai_kernel")
    assert chosen(own, "rms_norm", CUDA) == "triton.rms_norm"
    assert chosen(table_for(CUDA, attn="sdpa"), "attention", CUDA) == "sdpa.attention"


def test_what_does_not_fit_falls_to_the_reference() -> None:
    table = table_for(CUDA, norm="phyai-kernel")
    wide = table.explain_one("rms_norm", device="cuda", dtype="float32", width=1 << 20)
    assert wide.row == "torch.rms_norm"


def test_a_policy_comes_first(tmp_path: Path) -> None:
    policy = {
        "schema": 1,
        "rules": [{"id": "mine", "match": {"op": "attention"}, "prefer": "sdpa.attention"}],
    }
    file = tmp_path / "policy.yaml"
    file.write_text(json.dumps(policy))
    for kernel in (KernelConfig(policy_config=policy), KernelConfig(config_path=str(file))):
        table = table_for(CPU, kernel, attn="eager", linear="torch")
        assert chosen(table, "attention", CPU) == "sdpa.attention"
        assert chosen(table, "linear", CPU) == "torch.linear"
    file.write_text(json.dumps({"schema": 2}))
    with pytest.raises(ConfigError, match=r"policy\.yaml: policy\.schema"):
        table_for(CPU, KernelConfig(config_path=str(file)), attn="eager")


@pytest.mark.parametrize(
    ("backends", "message"),
    [
        ({"norm": "phyai-kernel"}, r"backends\.norm must name .* for cpu; got 'phyai-kernel'\."),
        ({"linear": "humming"}, r"backends\.linear must .* Kernels here are of: .*torch"),
        ({"linear": "flashinfer"}, r"backends\.linear must .*got 'flashinfer'"),
    ],
)
def test_a_back_end_without_kernels_is_refused(backends: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table_for(CPU, **backends)


def test_a_plugins_rows_count() -> None:
    table = KernelTable()
    table.add([KernelRow("linear", "humming.linear", lambda x, w, b: x, devices=("cpu",))])
    config = EngineConfig(backends=BackendConfig(linear="humming"))
    apply_policy(table, with_backends(config, table, CPU))
    assert chosen(table, "linear", CPU) == "humming.linear"


def test_engines_obey(caplog: pytest.LogCaptureFixture) -> None:
    config = cpu_config().replace(backends=BackendConfig(attn="eager", norm="torch", vgpu="torch"))
    with caplog.at_level(logging.WARNING, "phyai"), engine_of("pi05", config) as engine:
        rows = {c.row for c in engine.core.services.kernels.choices if c.op == "attention"}
    assert rows == {"eager.attention"}
    assert "backends.vgpu 'torch' has no effect in this version" in caplog.text


def test_the_prefill_back_end_reaches_flashinfer() -> None:
    runtime = {"flashinfer_prefill_backend": "fa3"}
    table = table_for(CUDA, runtime=runtime)
    assert chosen(table, "attention", CUDA, "bfloat16") == "flashinfer.attention"
    kernel = table.select(
        "attention", device="cuda", dtype="bfloat16", head_dim=64, queries=9, masked=False
    )
    assert kernel.keywords == {"backend": "fa3"}  # type: ignore[attr-defined]
    assert chosen(table_for(CUDA, runtime=runtime, attn="sdpa"), "attention", CUDA) == (
        "sdpa.attention"
    )
