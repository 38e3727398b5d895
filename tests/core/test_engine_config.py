"""Engine configuration: defaults, exact validation, lazy dtypes, devices, compat shim."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import phyai.engine_config as module
from phyai.engine_config import (
    AttentionParallelConfig,
    BackendConfig,
    DenseParallelConfig,
    DeviceConfig,
    EngineConfig,
    KernelConfig,
    ParallelConfig,
    RuntimeConfig,
    get_engine_config,
    init_engine_config,
    resolve_device,
    set_engine_config,
)
from phyai.errors import ConfigError

TORCH_FREE = """
import sys, pickle
from phyai.engine_config import *
from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig, get_engine_config
from phyai.deployment import DeploymentConfig
from phyai import engine_builder, env
import phyai.server, phyai.server.deployment, phyai.server.lifecycle
import phyai.kernel, phyai.kernel.config
config = EngineConfig(device=DeviceConfig(target="cpu", params_dtype="fp32"))
assert "float32" in repr(config) and hash(config) and config == pickle.loads(pickle.dumps(config))
config = env.override(config, explicit=True, environ={"PHYAI_PARAMS_DTYPE": "fp16"})
assert config.device.replace(target="cuda").dtype_name == "float16"
assert "params_dtype: float16" in engine_builder.to_yaml(config)
built = engine_builder.config_from_mapping(
    {"config": {"device": {"target": "cpu", "params_dtype": "half"}}}, directory=".")
assert built.device.dtype_name == "float16"
assert engine_builder.schema() and engine_builder.to_yaml(DeploymentConfig())
assert "torch" not in sys.modules, "torch was imported"
assert "omegaconf" not in sys.modules, "omegaconf was imported"
"""


def test_configs_build_print_and_export_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", TORCH_FREE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- DeviceConfig


def test_params_dtype_reads_as_torch_dtype() -> None:
    assert DeviceConfig().params_dtype is torch.bfloat16
    assert DeviceConfig(params_dtype=torch.float32).params_dtype is torch.float32
    assert DeviceConfig(params_dtype=torch.float32).dtype_name == "float32"


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("bf16", "bfloat16"), torch.bfloat16),
        (("fp16", "float16", "half"), torch.float16),
        (("fp32", "float32", "float"), torch.float32),
        (("fp64", "float64", "double"), torch.float64),
    ],
)
def test_params_dtype_by_name(names: tuple[str, ...], dtype: torch.dtype) -> None:
    for name in names:
        config = DeviceConfig(params_dtype=name)
        assert config.params_dtype is dtype
        assert config == DeviceConfig(params_dtype=dtype)
        assert hash(config) == hash(DeviceConfig(params_dtype=dtype))


@pytest.mark.parametrize("value", ["bf61", torch.int64, None, 16, torch.zeros(1)])
def test_params_dtype_refuses(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"DeviceConfig\.params_dtype must be"):
        DeviceConfig(params_dtype=value)


def test_device_config_copies_equal_and_frozen() -> None:
    config = DeviceConfig("cpu", torch.float16)
    for other in (
        pickle.loads(pickle.dumps(config)),
        copy.copy(config),
        copy.deepcopy(config),
        dataclasses.replace(config),
        config.replace(),
        eval(repr(config)),
    ):
        assert other == config
        assert hash(other) == hash(config)
        assert other.params_dtype is torch.float16
    assert config != config.replace(params_dtype="fp32")
    assert dataclasses.replace(config, target="cuda:1").target == "cuda:1"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.params_dtype = torch.float32  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.target = "cuda"  # type: ignore[misc]


@pytest.mark.parametrize("target", ["cuda", "cuda:0", "cuda:12", "cpu"])
def test_target_accepts(target: str) -> None:
    assert DeviceConfig(target=target).target == target


@pytest.mark.parametrize("target", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "CPU", "", 0])
def test_target_refuses(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"DeviceConfig\.target must be cuda, cuda:N or cpu; got"):
        DeviceConfig(target=target)


def test_resolve_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(DeviceConfig(target="cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r'target="cpu" \(PHYAI_DEVICE=cpu\)'):
        resolve_device(EngineConfig())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device(DeviceConfig(target="cuda:1")) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="2 visible CUDA devices; got 'cuda:2'"):
        resolve_device(DeviceConfig(target="cuda:2"))


# ---------------------------------------------------------------- the other sections


def test_defaults() -> None:
    runtime = RuntimeConfig()
    assert runtime.use_cuda_graph is True
    assert runtime.graph_backend == "auto"
    assert runtime.flashinfer_workspace_bytes == 134217728
    assert runtime.flashinfer_bf16_backend == "cudnn"
    assert runtime.dist_timeout_s == 600.0
    assert runtime.freeze_kernel_choices is True
    assert runtime.max_live_caches == 16
    assert (runtime.max_sessions, runtime.session_ttl_s) == (8, None)
    assert runtime.batch_wait_ms == 0.0
    assert runtime.num_threads is runtime.seed is runtime.memory_budget_bytes is None
    assert BackendConfig() == BackendConfig("flashinfer", "flashinfer", None, None, None)
    assert KernelConfig() == KernelConfig(None, None, None, None, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_cuda_graph", 1),
        ("graph_backend", "jit"),
        ("max_live_caches", True),
        ("max_live_caches", 0),
        ("max_sessions", 0),
        ("session_ttl_s", 0.0),
        ("session_ttl_s", True),
        ("batch_wait_ms", -1.0),
        ("batch_wait_ms", None),
        ("batch_wait_ms", float("inf")),
        ("memory_budget_bytes", 0),
        ("memory_budget_bytes", 1.5),
        ("num_threads", 0),
        ("num_threads", 100_000),
        ("seed", -1),
        ("seed", 2**63),
        ("dist_timeout_s", 0.0),
        ("dist_timeout_s", float("nan")),
        ("dist_timeout_s", True),
        ("flashinfer_workspace_bytes", -1),
        ("flashinfer_prefill_backend", "fa4"),
        ("flashinfer_bf16_backend", None),
        ("force_linear_kernel", ""),
        ("debug_tensor_dump_dir", 3),
        ("debug_tensor_dump_filter", ["a"]),
        ("debug_tensor_dump_filter", ()),
        ("debug_tensor_dump_filter", ("(",)),
        ("debug_tensor_dump_filter_fn", "no_colon"),
    ],
)
def test_runtime_config_refuses(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"RuntimeConfig\.{field} must .*; got "):
        RuntimeConfig(**{field: value})


def test_runtime_config_dump_filters_exclude_each_other() -> None:
    assert RuntimeConfig(debug_tensor_dump_filter_fn="/tmp/f.py:pick")
    assert RuntimeConfig(debug_tensor_dump_filter_fn="pkg.mod:pick")
    with pytest.raises(ConfigError, match="excludes debug_tensor_dump_filter_fn"):
        RuntimeConfig(debug_tensor_dump_filter=("a",), debug_tensor_dump_filter_fn="a:b")


def test_backend_names_are_normalised_and_checked() -> None:
    config = BackendConfig(attn="SDPA", norm="phyai_kernel", vgpu="Torch")
    assert (config.attn, config.norm, config.vgpu) == ("sdpa", "phyai-kernel", "torch")
    with pytest.raises(
        ConfigError,
        match=r"BackendConfig\.attn must be one of eager, flashinfer, sdpa; got 'spda'\. Did you",
    ):
        BackendConfig(attn="spda")
    with pytest.raises(ConfigError, match=r"BackendConfig\.norm"):
        BackendConfig(norm=None)  # type: ignore[arg-type]


def test_parallel_flat_and_nested_forms_agree() -> None:
    nested = ParallelConfig(
        dense=DenseParallelConfig(tp_size=4), attention=AttentionParallelConfig(tp_size=4)
    )
    assert ParallelConfig(tp_size=4) == nested
    assert nested.tp_size == 4
    assert ParallelConfig().infer_replica_world_size() == 1
    both = ParallelConfig(tp_size=2, cfg_size=2, world_size=4)
    assert both.infer_replica_world_size() == 4
    assert nested.replace(tp_size=2).dense == DenseParallelConfig(2)
    assert nested.replace(cfg_size=2).tp_size == 4
    assert nested.resolve(4).world_size == 4
    assert pickle.loads(pickle.dumps(both)) == both
    with pytest.raises(ConfigError, match=r"world_size must be .* = 4; got 8"):
        nested.resolve(8)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp_size": 2}, r"ParallelConfig\.dp_size must be 1; got 2.*replica_count"),
        ({"pipeline_size": 2}, r"ParallelConfig\.pipeline_size must be 1"),
        ({"ep_size": 2}, r"ParallelConfig\.ep_size must be 1"),
        ({"tp_size": 0}, r"ParallelConfig\.tp_size must be an int >= 1"),
        ({"cfg_size": True}, r"ParallelConfig\.cfg_size must be an int >= 1"),
        ({"tp_size": 2, "dense": DenseParallelConfig(4)}, "must equal dense.tp_size"),
        ({"dense": DenseParallelConfig(4), "attention": AttentionParallelConfig(2)}, "must equal"),
        ({"dense": AttentionParallelConfig(2)}, r"ParallelConfig\.dense must be a Dense"),
        ({"world_size": 3}, r"ParallelConfig\.world_size must be .* = 1; got 3"),
    ],
)
def test_parallel_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**values)


def test_kernel_config_owns_its_policy_and_excludes_a_path(tmp_path: Path) -> None:
    policy: dict[str, Any] = {"rules": [{"id": "a"}]}
    config = KernelConfig(policy_config=policy)
    policy["rules"].clear()
    assert config.policy_config == {"rules": [{"id": "a"}]}
    assert hash(config) == hash(config.replace())
    assert pickle.loads(pickle.dumps(config)) == config
    path: Any = tmp_path / "p.yaml"
    assert KernelConfig(config_path=path).config_path == str(path)
    with pytest.raises(ConfigError, match="excludes policy_config"):
        KernelConfig(policy_config={}, config_path="p.yaml")
    with pytest.raises(ConfigError, match=r"KernelConfig\.profile must be one of static, autotune"):
        KernelConfig(profile="fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"KernelConfig\.benchmark"):
        KernelConfig(benchmark=3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- EngineConfig


def test_engine_config_checks_sections_and_replaces_them() -> None:
    config = EngineConfig()
    changed = config.replace(device=DeviceConfig("cpu"))
    assert changed.device.target == "cpu"
    assert changed.runtime is config.runtime
    assert config.device.target == "cuda"
    with pytest.raises(ConfigError, match=r"EngineConfig\.runtime must be a RuntimeConfig"):
        EngineConfig(runtime={})  # type: ignore[arg-type]


def test_auto_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = EngineConfig.auto()
    assert (cpu.backends.attn, cpu.backends.norm) == ("sdpa", "torch")
    assert (cpu.device.target, cpu.device.params_dtype) == ("cpu", torch.float32)
    assert cpu.runtime.use_cuda_graph is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cuda = EngineConfig.auto()
    assert (cuda.backends.attn, cuda.backends.norm) == ("flashinfer", "flashinfer")
    assert (cuda.device.target, cuda.device.params_dtype) == ("cuda", torch.bfloat16)
    assert cuda.runtime.use_cuda_graph is True


def test_compat_singleton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_singleton", None)
    monkeypatch.setenv("PHYAI_SEED", "11")
    first = get_engine_config()
    assert first.runtime.seed == 11
    monkeypatch.setenv("PHYAI_SEED", "12")
    assert get_engine_config() is first
    other = EngineConfig()
    assert init_engine_config(other) is other
    assert get_engine_config() is other
    with pytest.raises(ConfigError, match="must be an EngineConfig"):
        set_engine_config(None)  # type: ignore[arg-type]


def test_earlier_import_paths_are_the_same_objects() -> None:
    import phyai.kernel
    import phyai.kernel.config
    import phyai.server
    import phyai.server.deployment
    import phyai.server.lifecycle
    from phyai.deployment import DeploymentConfig, WorkerSupervisorConfig
    from phyai.errors import EngineUnavailableError

    assert phyai.kernel.config.KernelConfig is phyai.kernel.KernelConfig is KernelConfig
    assert phyai.server.DeploymentConfig is phyai.server.deployment.DeploymentConfig
    assert phyai.server.deployment.DeploymentConfig is DeploymentConfig
    assert phyai.server.WorkerSupervisorConfig is WorkerSupervisorConfig
    assert phyai.server.lifecycle.EngineUnavailableError is EngineUnavailableError
