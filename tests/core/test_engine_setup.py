"""Starting an engine: argument types, failing starts, deployment and device, first scripts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from phyai import DeploymentConfig, Engine, EngineArgs, EngineConfig, Observation
from phyai.deployment import WorkerSupervisorConfig
from phyai.deployment.managed import check_placed, devices_of
from phyai.engine_config import (
    DenseParallelConfig,
    DeviceConfig,
    ParallelConfig,
    RuntimeConfig,
)
from phyai.errors import CapacityError, ConfigError, PluginNotFound
from tests.core.toy_adapter import ToyAdapter, ToyArgs, config, open_engine, registry

GOLDEN = Path(__file__).parents[1] / "golden" / "pi05"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PHYAI_DEVICE", "PHYAI_DTYPE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with registry():
        yield


def observation() -> Observation:
    return Observation(state=[0.0, 0.0, 0.0, 0.0])


def replica(engine: Engine) -> dict[str, Any]:
    (one,) = engine.stats()["replicas"]
    return dict(one)


# ---------------------------------------------------------------- construction


def test_wrong_types_are_type_errors() -> None:
    Engine.register(ToyAdapter)
    with pytest.raises(TypeError, match="EngineArgs; got str"):
        Engine("toy")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="plugin must be a str; got type"):
        EngineArgs(ToyAdapter, ToyArgs())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be an EngineConfig; got dict"):
        EngineArgs("toy", ToyArgs(), {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="deployment must be a DeploymentConfig; got dict"):
        Engine(EngineArgs("toy", ToyArgs(), config()), deployment={})  # type: ignore[arg-type]


def test_wrong_plugin_args_name_both_types() -> None:
    Engine.register(ToyAdapter)
    with pytest.raises(TypeError, match="'toy' must be ToyArgs; got dict"):
        Engine(EngineArgs("toy", {}, config()))  # type: ignore[arg-type]
    from phyai.models.pi05.main_pi05 import PI05Args

    with pytest.raises(TypeError, match="'toy' must be ToyArgs; got PI05Args"):
        Engine(EngineArgs("toy", PI05Args(), config()))


def test_an_unknown_plugin_is_named_with_what_there_is() -> None:
    with pytest.raises(PluginNotFound, match=r"'toy-nobody'.*pi05"):
        Engine(EngineArgs("toy-nobody", ToyArgs(), config()))


@pytest.mark.parametrize("kind", ["load", "part"])
def test_a_failing_start_closes_and_raises_what_went_wrong_first(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from phyai import engine_core

    arenas: list[Any] = []
    arena = engine_core.Arena
    monkeypatch.setattr(engine_core, "Arena", lambda *a: arenas.append(arena(*a)) or arenas[-1])
    if kind == "part":
        monkeypatch.setattr(ToyAdapter, "solver", lambda self: 1 / 0)
    before = threading.active_count()
    closed: list[str] = []
    error = OSError if kind == "load" else ZeroDivisionError
    with pytest.raises(error, match=r"disk on fire|division by zero"):
        open_engine(fail=kind, closed=closed)
    assert closed == ["adapter"]  # whose close() raises as well
    assert threading.active_count() == before
    assert [a.nbytes for a in arenas] == [0]


def test_weights_that_no_memory_holds_are_a_capacity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyAdapter, "load", lambda self: torch.empty(2**58))
    with pytest.raises(CapacityError, match="must fit the memory of the device"):
        open_engine()


def test_the_adapter_is_reachable_under_both_names() -> None:
    with open_engine() as engine:
        assert engine.entry is engine.adapter
        assert isinstance(engine.adapter, ToyAdapter)
        assert engine.mode == "inline"


# ---------------------------------------------------------------- deployment and device


def construct(deployment: DeploymentConfig | None = None, **device: Any) -> Engine:
    Engine.register(ToyAdapter)
    cfg = EngineConfig(device=DeviceConfig(params_dtype="float32", **device))
    return Engine(EngineArgs("toy", ToyArgs(), cfg), deployment=deployment)


@pytest.mark.parametrize("deployment", [
    DeploymentConfig.local(devices=("cpu", "cpu"), replica_count=2),
    DeploymentConfig.local(),
    DeploymentConfig(devices=("cpu",)),
])  # fmt: skip
def test_workers_need_an_installed_plugin(deployment: DeploymentConfig) -> None:
    with pytest.raises(ConfigError, match=r"must be installed.*entry point.*'phyai\.plugins'"):
        construct(deployment, target="cpu")


def test_more_ranks_are_refused() -> None:
    Engine.register(ToyAdapter)
    cfg = config().replace(parallel=ParallelConfig(dense=DenseParallelConfig(tp_size=2)))
    with pytest.raises(ConfigError, match=r"parallel|tp"):
        Engine(EngineArgs("toy", ToyArgs(), cfg), deployment=DeploymentConfig.local())


def test_devices_of_replicas_left_out_are_the_first_ones() -> None:
    cpu = EngineConfig(device=DeviceConfig(target="cpu"))
    assert devices_of(DeploymentConfig.local(replica_count=3), cpu) == (("cpu",),) * 3


def test_a_batch_must_not_wait_longer_than_a_worker_may_be_silent() -> None:
    patience = WorkerSupervisorConfig(request_timeout_s=2.0)
    deployment = DeploymentConfig.local(("cpu",), process_config=patience)
    waiting = EngineConfig(
        device=DeviceConfig(target="cpu"), runtime=RuntimeConfig(batch_wait_ms=2000.0)
    )
    with pytest.raises(ConfigError, match=r"batch_wait_ms must be less .*\(2 s\).* got 2000"):
        Engine(EngineArgs("toy", ToyArgs(), waiting), deployment=deployment)


@pytest.mark.parametrize(
    ("devices", "target"), [((0,), "cpu"), (("cpu",), "cuda"), ((1,), "cuda:0")]
)
def test_devices_that_contradict_the_target_are_refused(devices: Any, target: str) -> None:
    with pytest.raises(
        ConfigError, match=r"must agree with EngineConfig\.device\.target"
    ) as caught:
        construct(DeploymentConfig.local(devices=devices), target=target)
    assert repr(target) in str(caught.value)


def test_a_device_of_the_deployment_picks_the_index() -> None:
    check_placed("cuda:2", "cuda")
    with pytest.raises(ConfigError, match="must agree"):
        check_placed("cuda:2", "cuda:1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_without_cuda_names_the_remedy_and_never_falls_back() -> None:
    with pytest.raises(ConfigError, match='target="cpu"'):
        construct(target="cuda")
    with pytest.raises(ConfigError, match='target="cpu"'):
        construct(DeploymentConfig.local(devices=(0,)), target="cuda")


def test_the_environment_overrides_an_explicit_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    with construct(target="cuda") as engine:
        assert engine.config.device.target == "cpu"
        assert replica(engine)["devices"] == ["cpu"]
    monkeypatch.setenv("PHYAI_DEVICE", "tpu")
    with pytest.raises(ConfigError, match="PHYAI_DEVICE"):
        construct(target="cpu")


# ---------------------------------------------------------------- the snippet users start from


def test_the_four_replica_script_builds_its_configuration() -> None:
    from phyai import DeploymentConfig, EngineArgs
    from phyai.engine_config import DeviceConfig, EngineConfig
    from phyai.models.pi05.main_pi05 import PI05Args

    args = EngineArgs(
        plugin="pi05",
        plugin_args=PI05Args(checkpoint_dir="checkpoint", max_batch_size=1),
        config=EngineConfig(device=DeviceConfig(target="cuda", params_dtype=torch.bfloat16)),
    )
    deployment = DeploymentConfig.local(devices=(0, 1, 2, 3), replica_count=4)
    assert (deployment.replica_count, deployment.devices) == (4, (0, 1, 2, 3))
    assert args.config is not None
    assert args.config.device.params_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="has no usable CUDA; got 'cuda:0'"):
        Engine(args, deployment=deployment)


@pytest.mark.slow
def test_the_same_script_runs_with_one_replica_on_the_cpu() -> None:
    from phyai.models import pi05
    from phyai.models.pi05 import scheduler_pi05, scheduler_ws1_pi05
    from phyai.models.pi05.main_pi05 import PI05Args, PI05Request

    for place in (pi05, scheduler_pi05, scheduler_ws1_pi05):
        assert place.PI05Request is PI05Request
    args = EngineArgs(
        plugin="pi05",
        plugin_args=PI05Args(checkpoint_dir=str(GOLDEN), max_batch_size=1),
        config=EngineConfig(device=DeviceConfig(target="cpu", params_dtype=torch.float32)),
    )
    requests = [
        PI05Request(
            pixel_values=torch.zeros(1, 1, 3, 56, 56),
            input_ids=torch.tensor([[2, 5, 7, 9]]),
            lang_lens=torch.tensor([4]),
            noise=torch.full((1, 10, 8), float(i)),
            num_steps=2,
        )
        for i in range(3)
    ]
    deployment = DeploymentConfig.local(devices=("cpu",), replica_count=1)
    with Engine(args, deployment=deployment) as engine:
        futures = [engine.submit(request) for request in requests]
        results = [future.result().cpu() for future in futures]
    assert all(isinstance(future, Future) for future in futures)
    assert [list(r.shape) for r in results] == [[1, 10, 8]] * 3
    assert not torch.equal(results[0], results[1])
    assert not [t for t in threading.enumerate() if t.name.startswith("phyai")]


def test_a_mistyped_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PHYAI_DEVISE", "cpu")
    with open_engine(ToyAdapter):
        pass
    assert "PHYAI_DEVISE is read by nothing. Did you mean 'PHYAI_DEVICE'?" in caplog.text
