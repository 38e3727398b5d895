"""Kernel policies of engines: config, variables, YAML files, `phyai config` and `phyai doctor`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai import Engine, EngineArgs, EngineConfig
from phyai.cli.app import main
from phyai.engine_builder import build_engine
from phyai.engine_config import DeviceConfig, KernelConfig, RuntimeConfig
from phyai.errors import ConfigError, KernelUnavailable
from phyai.kernel_setup import installed_table, kernel_table
from phyai.kernels import Candidate, KernelTable
from phyai.kernels.facts import FACTS
from phyai.kernels.native import available
from tests.core.toy_adapter import ToyAdapter, ToyArgs, registry
from tests.pi.tiny_engines import GOLDEN, model_request

EAGER = {
    "schema": "phyai.kernel/v1",
    "rules": [{"id": "eager", "match": {"op": "attention"}, "prefer": "eager.attention"}],
}
QUANTISED = {
    "schema": 1,
    "quantization": {
        "method": "rtn",
        "rules": [{"match": {"glob": "*"}, "weight": {"dtype": "int8"}}],
    },
}


class AskingAdapter(ToyAdapter):
    """Chooses one attention kernel when it loads."""

    name = "toy-asking"

    def load(self) -> None:
        super().load()
        self.services.kernels.select("attention", device="cpu", dtype="float32", head_dim=8)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PHYAI_KERNEL_CONFIG", "PHYAI_KERNEL_PROFILE", "PHYAI_FORCE_LINEAR_KERNEL"):
        monkeypatch.delenv(name, raising=False)
    with registry():
        Engine.register(AskingAdapter)
        yield


def write(folder: Path, policy: Any = EAGER) -> Path:
    path = folder / "policy.yaml"
    path.write_text(json.dumps(policy))  # JSON is YAML
    return path


# float32 attention on this machine: the C++ kernel needs a compiler
FITTING = ["sdpa.attention"] if available() is not True else ["native.attention", "sdpa.attention"]
BEST = FITTING[0]


def decided(kernel: KernelConfig | None = None, **runtime: Any) -> KernelTable:
    """Return the table of an engine that has started."""
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype="float32"),
        kernel=kernel or KernelConfig(),
        runtime=RuntimeConfig(**runtime),
    )
    with Engine(EngineArgs("toy-asking", ToyArgs(), config)) as engine:
        return engine.core.services.kernels


def test_a_policy_decides_inline_from_a_file_and_by_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decided().choices[0].row == BEST
    inline = decided(KernelConfig(policy_config=EAGER))
    assert (inline.choices[0].row, inline.choices[0].by) == ("eager.attention", "rule 'eager'")
    assert inline.context["model.family"] == "toy-asking"
    file = KernelConfig(config_path=str(write(tmp_path)))
    assert decided(file).choices[0].row == "eager.attention"
    family = {"op": "attention", "model.family": "toy-asking", "device.type": "cpu"}
    other = {**EAGER, "rules": [{"id": "f", "match": family, "restrict_to": "eager*"}]}
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(write(tmp_path, other)))
    assert decided(KernelConfig(policy_config=EAGER)).choices[0].by == "rule 'f'"


def test_errors_come_before_the_adapter_is_made(tmp_path: Path) -> None:
    unknown = {"schema": 1, "rules": [{"id": "a", "match": {"op": "silu"}, "prefer": "silu"}]}
    with pytest.raises(ConfigError, match=r"^kernel_policy\.rules\[0\]\.prefer must name a kernel"):
        decided(KernelConfig(policy_config=unknown))
    with pytest.raises(ConfigError, match=r"policy\.yaml: policy\.schema must be"):
        decided(KernelConfig(config_path=str(write(tmp_path, {"schema": 2}))))
    strict = [{"id": "no", "match": {"op": "attention"}, "use": "triton.attention"}]
    with pytest.raises(KernelUnavailable, match="Change override 'no' of the kernel policy"):
        decided(KernelConfig(policy_config={"schema": 1, "overrides": strict}))


def test_a_plan_that_quantises_reaches_the_table_of_the_engine() -> None:
    policy = decided(KernelConfig(policy_config=QUANTISED)).policy
    assert policy is not None
    assert str(policy.policy.quantization.scheme_for("x")) == "int8 block [1, 128], 16-bit inputs"


def test_profile_of_config_and_variable_beats_the_policys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def cheapest_is_last(candidate: Candidate) -> float:
        asked.append(candidate.kernel)
        return -float(len(asked))

    kernel = KernelConfig(
        benchmark=cheapest_is_last,
        autotune_cache=str(tmp_path / "tuned.json"),
        policy_config={"schema": 1, "profile": "autotune"},
    )
    assert decided(kernel).choices[0].row == "eager.attention"
    assert asked == [*FITTING, "eager.attention"]
    assert (tmp_path / "tuned.json").exists()
    decided(kernel)
    assert len(asked) == len(FITTING) + 1  # the second engine read the cache
    assert decided(kernel.replace(profile="static")).choices[0].row == BEST
    monkeypatch.setenv("PHYAI_KERNEL_PROFILE", "autotune")
    assert decided(KernelConfig(benchmark=cheapest_is_last)).choices[0].by == "measurement"


def test_force_linear_kernel_reaches_the_table() -> None:
    config = EngineConfig(runtime=RuntimeConfig(force_linear_kernel="upcast.linear"))
    table = kernel_table(config, torch.device("cpu"))
    assert table.explain_one("linear", device="cpu", dtype="float32").row is None
    with pytest.raises(ConfigError, match=r"must be one of .*; got 'upcast.linea'"):
        decided(force_linear_kernel="upcast.linea")


def test_layers_of_a_real_model_pass_known_facts_and_roles(tmp_path: Path) -> None:
    root = GOLDEN / "pi05"
    tower = {"op": "attention", "role": "vision", "shape.head_dim": ">=1", "model.family": "pi05"}
    policy = {"schema": 1, "overrides": [{"id": "tower", "match": tower, "use": "eager.attention"}]}
    file = tmp_path / "engine.yaml"
    file.write_text(
        json.dumps(
            {
                "plugin": "pi05",
                "plugin_args": {
                    "checkpoint_dir": str(root),
                    "precision": "fp32",
                    "max_batch_size": 2,
                    "tokenizer": str(root / "tokenizer"),
                    "processor_dir": str(root / "processors_abs"),
                },
                "config": {"device": {"target": "cpu", "params_dtype": "fp32"}},
                "kernel_policy": policy,
            }
        )
    )
    with build_engine(file) as engine:
        table = engine.core.services.kernels
        request = model_request(engine)
        ours = engine.step(request)
    by_role: dict[str, set[str]] = {}
    for choice in table.choices:
        facts = dict(choice.facts)
        device, dtype = facts.pop("device"), facts.pop("dtype")
        dotted = table.facts_of(choice.op, device=device, dtype=dtype, **facts)
        assert set(dotted) <= set(FACTS) | table.known_facts, choice
        if choice.op == "attention":
            by_role.setdefault(facts["role"], set()).add(f"{choice.row} {choice.by}".strip())
    assert by_role == {
        "vision": {"eager.attention override 'tower'"},
        "prefix": {BEST},
        "expert": {BEST},
    }
    assert torch.isfinite(ours).all()


# ---------------------------------------------------------------- command line


def test_config_check_reads_the_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.yaml"
    write(tmp_path)
    file.write_text("kernel_policy: policy.yaml\nconfig: {device: {target: cpu}}\n")
    assert main(["config", str(file), "--check"]) == 0
    write(tmp_path, {**EAGER, "rules": [{"id": "a", "match": {"op": "x"}, "prefer": "y"}]})
    assert main(["config", str(file), "--check"]) == 2
    assert "policy.rules[0].match.op must be a known op; got 'x'" in capsys.readouterr().err


def test_doctor_shows_what_a_policy_chooses_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = {"op": "silu", "device.arch": ">=sm90"}
    policy = {
        **EAGER,
        **QUANTISED,
        "schema": "v1",
        "overrides": [
            {"id": "gpu", "priority": 3, "match": gpu, "use": "torch.silu"},
            {
                "id": "half",
                "match": {"op": "attention", "dtype": "bf16"},
                "use": "sdpa.attention",
            },
        ],
    }
    path = str(write(tmp_path, policy))
    assert main(["doctor", "--kernels", "--policy", path, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["catalogue"]) == len(data["policy"]["fingerprint"]) == 16
    attention = next(entry for entry in data["kernels"] if entry["op"] == "attention")
    assert attention["chosen"] == {"float32": "eager.attention", "bfloat16": None}
    assert attention["why"] == {"float32": "rule 'eager'", "bfloat16": "override 'half'"}
    rules = {rule["id"]: rule["not_here"] for rule in data["policy"]["rules"]}
    assert list(rules) == ["gpu", "half", "eager"]
    assert rules["half"] == {
        "attention fp32": "dtype.input is float32; needs bfloat16",
        "attention bf16": None,
    }
    assert main(["doctor", "--kernels", "--policy", path, "--plugin", "toy-asking"]) == 0
    out = capsys.readouterr().out
    assert "attention fp32: eager.attention, by rule 'eager'" in out
    assert "attention bf16: nothing fits, an engine would not start, by override 'half'" in out
    assert "override gpu, priority 3: not here: device.arch is" in out
    assert "quantization: glob '*': int8 block [1, 128], 16-bit inputs" in out
    write(tmp_path, {"schema": 1, "rule": []})
    assert main(["doctor", "--kernels", "--policy", path]) == 2
    assert "policy.rule must be a known key" in capsys.readouterr().err
    assert main(["doctor", "--policy", path]) == 2


def test_doctor_reads_the_policy_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(write(tmp_path)))
    monkeypatch.setenv("PHYAI_KERNEL_PROFILE", "autotune")
    assert main(["doctor", "--kernels"]) == 0
    assert "profile autotune" in capsys.readouterr().out


def test_an_installed_table_holds_the_facts_of_this_machine() -> None:
    assert set(installed_table().context) <= set(FACTS)
