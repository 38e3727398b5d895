"""Engines from YAML: strict reading, exact types, dotted paths, relative paths, overrides."""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from phyai import engine_builder
from phyai.config_mapping import from_mapping, to_mapping
from phyai.deployment import DeploymentConfig, WorkerSupervisorConfig
from phyai.engine_builder import (
    build_engine,
    engine_args_from_mapping,
    load_yaml_mapping,
    schema,
    to_yaml,
)
from phyai.engine_config import DeviceConfig, EngineConfig, KernelConfig, RuntimeConfig
from phyai.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    TWO = 2


@dataclass(frozen=True)
class Inner:
    width: int
    scale: float = 1.0


@dataclass(frozen=True)
class Args:
    checkpoint_dir: str | Path | None = None
    checkpoint: str | None = None
    other_dir: str | None = None
    max_batch_size: int = 1
    ratio: float = 0.5
    strict: bool = True
    mode: Literal["fast", "exact"] = "fast"
    colour: Colour = Colour.RED
    dtype: torch.dtype | None = None
    inner: Inner | None = None
    shapes: list[list[int]] | None = None
    pair: tuple[int, str] | None = None
    names: Sequence[str] = ()
    table: Mapping[str, int] = field(default_factory=dict)
    remap: Callable[[str], str] | dict[str, str] | None = None
    hook: Callable[[str], str] | None = None
    noise: torch.Tensor | None = None
    missing: "NotImported | None" = None  # type: ignore[name-defined]  # noqa: F821, UP037
    folder: Path | None = None


@dataclass(frozen=True)
class FakeEngineArgs:
    plugin: str
    plugin_args: Any
    config: EngineConfig | None = None


@dataclass
class FakeEngine:
    args: FakeEngineArgs
    deployment: DeploymentConfig | None = None


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = types.ModuleType("phyai.engine")
    engine.EngineArgs = FakeEngineArgs  # type: ignore[attr-defined]
    engine.Engine = FakeEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "phyai.engine", engine)
    monkeypatch.setattr(engine_builder, "_args_class", lambda plugin: Args)


def build(data: dict[str, Any], directory: str | Path = "/yaml") -> Any:
    args, _ = engine_args_from_mapping({"plugin": "p", **data}, directory=directory)
    return args


def build_args(**values: Any) -> Args:
    args = build({"plugin_args": values}).plugin_args
    assert isinstance(args, Args)
    return args


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- plugin_args, exact types


def test_every_supported_type() -> None:
    args = build_args(
        checkpoint_dir="org/model",
        max_batch_size=4,
        ratio=2,
        strict=False,
        mode="exact",
        colour=2,
        dtype="half",
        inner={"width": 3},
        shapes=[[360, 360, 3]],
        pair=[1, "a"],
        names=["a", "b"],
        table={"a": 1},
        remap={"a.": "b."},
        folder="x/y",
    )
    assert args == Args(
        checkpoint_dir="org/model",
        max_batch_size=4,
        ratio=2.0,
        strict=False,
        mode="exact",
        colour=Colour.TWO,
        dtype=torch.float16,
        inner=Inner(3),
        shapes=[[360, 360, 3]],
        pair=(1, "a"),
        names=("a", "b"),
        table={"a": 1},
        remap={"a.": "b."},
        folder=Path("x/y"),
    )
    assert type(args.ratio) is float
    assert build_args(inner=None, dtype=None) == Args()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch_size": True}, r"^plugin_args\.max_batch_size must be int; got True"),
        ({"max_batch_size": 1.0}, r"^plugin_args\.max_batch_size must be int; got 1\.0"),
        ({"max_batch_size": "1"}, r"^plugin_args\.max_batch_size must be int; got '1'"),
        ({"max_batch_size": None}, r"^plugin_args\.max_batch_size must be int; got None"),
        ({"ratio": "0.5"}, r"^plugin_args\.ratio must be float"),
        ({"ratio": True}, r"^plugin_args\.ratio must be float"),
        ({"strict": 1}, r"^plugin_args\.strict must be bool"),
        ({"strict": "yes"}, r"^plugin_args\.strict must be bool"),
        ({"checkpoint_dir": 3}, r"^plugin_args\.checkpoint_dir must be str \| path \| null; got 3"),
        ({"mode": "exakt"}, r"^plugin_args\.mode must be one of fast, exact; .*mean 'exact'"),
        ({"colour": "2"}, r"^plugin_args\.colour must be one of red, 2; got '2'"),
        ({"dtype": "int8"}, r"^plugin_args\.dtype must be a floating"),
        ({"dtype": torch.float32}, r"^plugin_args\.dtype must be dtype.*cannot be given in YAML"),
        ({"inner": {}}, r"^plugin_args\.inner\.width is required \(int\)"),
        ({"inner": {"width": 1.5}}, r"^plugin_args\.inner\.width must be int"),
        (
            {"inner": {"widht": 1}},
            r"^plugin_args\.inner\.widht must be .*'plugin_args\.inner\.width'",
        ),
        ({"inner": [1]}, r"^plugin_args\.inner must be a mapping; got \[1\]"),
        ({"shapes": [[1, "x"]]}, r"^plugin_args\.shapes\[0\]\[1\] must be int; got 'x'"),
        ({"shapes": (1,)}, r"^plugin_args\.shapes must be list of list of int"),
        ({"pair": [1]}, r"^plugin_args\.pair must be a list of 2 items"),
        ({"names": "ab"}, r"^plugin_args\.names must be list of str; got 'ab'"),
        ({"table": {"a": "b"}}, r"^plugin_args\.table\.a must be int"),
        ({"table": {1: 1}}, r"^plugin_args\.table must have string keys; got 1"),
        ({"remap": "mod:fn"}, r"^plugin_args\.remap must be Python only \| mapping \| null"),
        ({"remap": str.lower}, r"^plugin_args\.remap .*cannot be given in YAML"),
        ({"hook": "mod:fn"}, r"^plugin_args\.hook cannot be given in YAML; got 'mod:fn'"),
        ({"noise": [1.0]}, r"^plugin_args\.noise cannot be given in YAML"),
        ({"noise": torch.zeros(1)}, r"^plugin_args\.noise cannot be given in YAML"),
        ({"missing": {}}, r"^plugin_args\.missing cannot be given in YAML"),
        ({"batch": 1}, r"^plugin_args\.batch must be a known key"),
        ({"max_batchsize": 1}, r"Did you mean 'plugin_args\.max_batch_size'\?"),
    ],
)
def test_plugin_args_refuse_with_dotted_path(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_args(**values)


def test_an_error_of_the_dataclass_gets_the_dotted_path(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        pass

    @dataclass(frozen=True)
    class Strict:
        size: int = 1

        def __post_init__(self) -> None:
            raise ValueError("size is too small")

    monkeypatch.setattr(engine_builder, "_args_class", lambda plugin: Strict)
    with pytest.raises(ConfigError, match=r"^plugin_args: size is too small"):
        build({"plugin_args": {}})
    monkeypatch.setattr(engine_builder, "_args_class", lambda plugin: Refusing)
    with pytest.raises(ConfigError, match="must be described by a dataclass"):
        build({"plugin_args": {}})


# ---------------------------------------------------------------- top level and config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"^plugin must be the id"),
        ({"plugin": 3}, r"^plugin must be the id"),
        ({"plugin": "p", "plugin_arg": {}}, r"^plugin_arg must be a known key.*'plugin_args'"),
        ({"plugin": "p", "plugin_args": []}, r"^plugin_args must be a mapping"),
        ({"plugin": "p", "config": 3}, r"^config must be a mapping"),
        ({"plugin": "p", "config": {"devise": {}}}, r"^config\.devise must .*'config\.device'"),
        ({"plugin": "p", "config": {"device": None}}, r"^config\.device must be a mapping"),
        (
            {"plugin": "p", "config": {"device": {"target": "tpu"}}},
            r"^config\.device\.target: DeviceConfig\.target must be",
        ),
        (
            {"plugin": "p", "config": {"device": {"params_dtype": "int8"}}},
            r"^config\.device\.params_dtype must be a floating",
        ),
        (
            {"plugin": "p", "config": {"device": {"target": "cpu"}, "runtime": {"seed": 1.0}}},
            r"^config\.runtime\.seed must be int; got 1\.0",
        ),
        (
            {"plugin": "p", "config": {"kernel": {"benchmark": "m:f"}}},
            r"^config\.kernel\.benchmark cannot be given in YAML",
        ),
        (
            {"plugin": "p", "config": {"parallel": {"dense": {"tp_size": 0}}}},
            r"^config\.parallel\.dense\.tp_size: DenseParallelConfig",
        ),
        (
            {"plugin": "p", "config": {"runtime": {"graph_backend": "cud"}}},
            r"^config\.runtime\.graph_backend must be one of auto, eager, inductor, cuda",
        ),
        (
            {"plugin": "p", "deployment": {"replicas": 2}},
            r"^deployment\.replicas must be a known key",
        ),
        (
            {"plugin": "p", "deployment": {"replica_count": 0}},
            r"^deployment\.replica_count: DeploymentConfig\.replica_count",
        ),
        ({"plugin": "p", "server": {}}, r"^server must be left out"),
        ({"plugin": "p", "adapter": {}}, r"^adapter must be left out"),
    ],
)
def test_refuses_with_dotted_path(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_args_from_mapping(data, directory="/yaml")


def test_a_whole_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
plugin: p
plugin_args: {checkpoint_dir: ./ckpt, max_batch_size: 2}
config:
  device: {target: cuda, params_dtype: float16}
  runtime: {use_cuda_graph: false, debug_tensor_dump_filter: [attn, mlp]}
  parallel: {tp_size: 2}
  backends: {norm: phyai_kernel}
deployment:
  mode: local
  replica_count: 2
  devices: [0, 1, cuda:2, 3]
  process_config: {startup_timeout_s: 1800}
""",
    )
    engine: Any = build_engine(path, ["config.device.target=cpu", "plugin_args.ratio=1"])
    assert isinstance(engine, FakeEngine)
    assert engine.args.plugin == "p"
    assert engine.args.plugin_args == Args(
        checkpoint_dir=str(tmp_path / "ckpt"), max_batch_size=2, ratio=1.0
    )
    config = engine.args.config
    assert config is not None
    assert config.device == DeviceConfig("cpu", torch.float16)
    assert config.runtime == RuntimeConfig(
        use_cuda_graph=False, debug_tensor_dump_filter=("attn", "mlp")
    )
    assert config.parallel.infer_replica_world_size() == 2
    assert config.backends.norm == "phyai-kernel"
    assert engine.deployment == DeploymentConfig.local(
        devices=(0, 1, "cuda:2", 3),
        replica_count=2,
        process_config=WorkerSupervisorConfig(startup_timeout_s=1800.0),
    )


def test_left_out_sections() -> None:
    args, deployment = engine_args_from_mapping(
        {"plugin": "p", "config": None, "deployment": None}, directory="."
    )
    assert args.config is None
    assert deployment is None


def test_config_without_a_device_starts_from_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = build({"config": {"runtime": {"seed": 1}}}).config
    assert config.device.target == "cpu"
    assert config.runtime == RuntimeConfig(use_cuda_graph=False, seed=1)
    config = build({"config": {"device": {}, "runtime": {"seed": 1}}}).config
    assert config == EngineConfig(runtime=RuntimeConfig(seed=1))


def test_server_keys_need_the_flag() -> None:
    data = {"plugin": "p", "server": {"port": 1}, "adapter": {"args": {}}}
    args, _ = engine_args_from_mapping(data, directory=".", server=True)
    assert args.plugin == "p"
    with pytest.raises(ConfigError, match="'server'"):
        engine_args_from_mapping({"plugin": "p", "sever": {}}, directory=".", server=True)


# ---------------------------------------------------------------- paths and policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("./ckpt", "/yaml/sub/ckpt"),
        ("../ckpt", "/yaml/ckpt"),
        (".", "/yaml/sub"),
        ("..", "/yaml"),
        ("/abs/ckpt", "/abs/ckpt"),
        ("~/ckpt", "/home/me/ckpt"),
        ("org/model", "org/model"),
        ("model", "model"),
        (".hidden", ".hidden"),
    ],
)
def test_checkpoint_paths(text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    values = {"checkpoint_dir": text, "checkpoint": text, "other_dir": text}
    args = build({"plugin_args": values}, "/yaml/sub").plugin_args
    assert args.checkpoint_dir == args.checkpoint == expected
    assert args.other_dir == text
    assert engine_builder.resolve_paths({"x": text, "n": 1}, Path("/yaml/sub")) == {
        "x": expected,
        "n": 1,
    }


def test_config_paths_are_always_paths() -> None:
    config = build(
        {
            "config": {
                "device": {},
                "kernel": {"config_path": "p.yaml", "autotune_cache": "/abs/a.json"},
                "runtime": {"debug_tensor_dump_dir": "a/dump"},
            }
        }
    ).config
    assert config.kernel.config_path == "/yaml/p.yaml"
    assert config.kernel.autotune_cache == "/abs/a.json"
    assert config.runtime.debug_tensor_dump_dir == "/yaml/a/dump"


def test_kernel_policy_is_a_path_or_a_mapping() -> None:
    policy = {"schema": "phyai.kernel/v1", "rules": [{"id": "a", "match": {"device.arch": "sm90"}}]}
    config = {"device": {}, "kernel": {"profile": "static"}}
    assert build({"config": config, "kernel_policy": "p.yaml"}).config.kernel == KernelConfig(
        "static", "/yaml/p.yaml"
    )
    assert build({"config": config, "kernel_policy": policy}).config.kernel == KernelConfig(
        "static", policy_config=policy
    )
    assert build({"kernel_policy": policy}).config.kernel.policy_config == policy
    for name, value in (("config_path", "q.yaml"), ("policy_config", {})):
        data = {"config": {"kernel": {name: value}}, "kernel_policy": "p.yaml"}
        with pytest.raises(ConfigError, match=rf"kernel_policy excludes config\.kernel\.{name}"):
            build(data)
    with pytest.raises(ConfigError, match="kernel_policy must be a path or a mapping; got 3"):
        build({"kernel_policy": 3})
    with pytest.raises(ConfigError, match=r"^config\.kernel\.policy_config\.x .*YAML"):
        build({"config": {"device": {}}, "kernel_policy": {"x": str.lower}})


# ---------------------------------------------------------------- export and description


def test_export_round_trips(tmp_path: Path) -> None:
    config = EngineConfig(
        device=DeviceConfig("cpu", "fp32"),
        runtime=RuntimeConfig(debug_tensor_dump_filter=("a", "b"), seed=3),
        kernel=KernelConfig(policy_config={"rules": []}),
    )
    path = write(tmp_path, to_yaml(config))
    assert from_mapping(EngineConfig, load_yaml_mapping(path), "config") == config
    assert to_mapping(config)["device"] == {"target": "cpu", "params_dtype": "float32"}
    deployment = DeploymentConfig.local(devices=("cpu", 0), replica_count=2)
    path = write(tmp_path, to_yaml(deployment))
    assert from_mapping(DeploymentConfig, load_yaml_mapping(path), "deployment") == deployment
    args = Args(dtype=torch.float16, colour=Colour.TWO, folder=Path("a"), inner=Inner(1))
    assert from_mapping(Args, to_mapping(args), "plugin_args") == args


def test_export_refuses_python_only_values() -> None:
    with pytest.raises(ConfigError, match=r"^kernel\.benchmark cannot be given in YAML"):
        to_mapping(EngineConfig(kernel=KernelConfig(benchmark=lambda: 0.0)))
    with pytest.raises(ConfigError, match="must be a dataclass instance"):
        to_mapping(EngineConfig)


def test_schema_describes_every_field() -> None:
    rows = {row.path: row for row in schema()}
    dtype = rows["config.device.params_dtype"]
    assert (dtype.type, dtype.default, dtype.env) == ("dtype", "bfloat16", "PHYAI_PARAMS_DTYPE")
    assert rows["config.runtime.graph_backend"].type == "auto | eager | inductor | cuda"
    assert rows["config.runtime.seed"].type == "int | null"
    assert rows["config.parallel.dense.tp_size"].default == 1
    assert rows["deployment.devices"].type == "list of int | str | null"
    assert rows["deployment.process_config.startup_timeout_s"].default == 900.0
    assert rows["deployment.mode"].env == ""
    assert all(row.help for row in rows.values()), [r.path for r in rows.values() if not r.help]
    from phyai.env import REGISTRY

    named = {row.env for row in rows.values() if row.env}
    assert named == {var.name for var in REGISTRY if var.field}
