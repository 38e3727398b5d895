"""Deployment configuration: devices, replicas, modes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from phyai import DeploymentConfig
from phyai.deployment import WorkerSupervisorConfig, replica_devices, resolve_mode
from phyai.engine_config import ParallelConfig
from phyai.errors import ConfigError

ONE, FOUR = ParallelConfig(), ParallelConfig(tp_size=4)


def test_defaults() -> None:
    config = DeploymentConfig()
    assert (config.mode, config.replica_count, config.devices) == ("auto", 1, None)
    assert (config.output_rank, config.auto_start, config.process_config) == (0, True, None)
    assert (config.share_devices, config.result_device) == (False, None)
    assert config.retry_on_worker_death is False
    supervision = config.supervision
    assert supervision == WorkerSupervisorConfig(900.0, 10.0, 2.0, 3, 300.0, None)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(DeploymentConfig())


def test_local_external_inline() -> None:
    local = DeploymentConfig.local(devices=(0, 1, 2, 3), replica_count=4)
    assert (local.mode, local.devices, local.replica_count) == ("local", (0, 1, 2, 3), 4)
    assert DeploymentConfig.local(devices=range(2), replica_count=2).devices == (0, 1)
    assert DeploymentConfig.local(devices=["cpu"]).devices == ("cpu",)
    assert DeploymentConfig.external(output_rank=1).mode == "external"
    assert DeploymentConfig.inline().mode == "inline"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"mode": "remote"},
            r"\.mode must be one of auto, inline, local, ray, external; got 'remote'",
        ),
        ({"replica_count": 0}, r"\.replica_count must be an int >= 1; got 0"),
        ({"replica_count": True}, r"\.replica_count must be an int"),
        ({"output_rank": -1}, r"\.output_rank must be"),
        ({"auto_start": 1}, r"\.auto_start must be True or False"),
        ({"process_config": {}}, r"\.process_config must be a WorkerSupervisorConfig or None"),
        ({"result_device": "cuda"}, r"\.result_device must be one of cpu, None"),
        ({"devices": ()}, r"\.devices must be a non-empty tuple"),
        ({"devices": "cpu"}, r"\.devices must be a non-empty tuple"),
        ({"devices": (-1,)}, r"\.devices must hold .* -1 is none"),
        ({"devices": (True,)}, r"\.devices must hold .* True is none"),
        ({"devices": ("cuda",)}, r"\.devices must hold .* 'cuda' is none"),
        ({"devices": (0, 1, 2), "replica_count": 2}, r"\.devices must divide"),
        ({"devices": (0, "cuda:0")}, r"must not repeat a CUDA device; cuda:0.*share_devices=True"),
        ({"mode": "inline", "replica_count": 2}, r"\.replica_count must be 1 in mode 'inline'"),
        ({"mode": "external", "devices": (0,)}, r"\.devices must be None in mode 'external'"),
    ],
)
def test_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"DeploymentConfig{message}|{message}"):
        DeploymentConfig(**values)


def test_shared_devices() -> None:
    assert DeploymentConfig.local(devices=("cpu", "cpu"), replica_count=2).devices
    assert DeploymentConfig.local(devices=(0, 0), replica_count=2, share_devices=True).devices


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("startup_timeout_s", 0),
        ("heartbeat_s", float("inf")),
        ("shutdown_timeout_s", -1.0),
        ("max_restarts", 1.0),
        ("restart_window_s", "300"),
        ("request_timeout_s", 0.0),
    ],
)
def test_supervisor_refuses(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"WorkerSupervisorConfig\.{field} must"):
        WorkerSupervisorConfig(**{field: value})


def test_replica_devices_in_order() -> None:
    config = DeploymentConfig.local(devices=(0, 1, "cuda:5", "cpu"), replica_count=2)
    assert replica_devices(config, ParallelConfig(tp_size=2)) == (
        ("cuda:0", "cuda:1"),
        ("cuda:5", "cpu"),
    )
    assert replica_devices(DeploymentConfig(), FOUR) is None
    with pytest.raises(ConfigError, match=r"= 2 \* 4 = 8 devices; got"):
        replica_devices(config, FOUR)


@pytest.mark.parametrize(
    ("deployment", "parallel", "environ", "mode"),
    [
        (None, ONE, {}, "inline"),
        (DeploymentConfig(), ONE, {"WORLD_SIZE": "1"}, "inline"),
        (DeploymentConfig(), ONE, {"WORLD_SIZE": "2"}, "external"),
        (DeploymentConfig(), FOUR, {}, "local"),
        (DeploymentConfig(replica_count=2), ONE, {}, "local"),
        (DeploymentConfig(devices=("cpu",)), ONE, {}, "local"),
        (DeploymentConfig.local(), ONE, {"WORLD_SIZE": "2"}, "local"),
        (DeploymentConfig.inline(), ONE, {"WORLD_SIZE": "2"}, "inline"),
        (DeploymentConfig.external(output_rank=3), FOUR, {}, "external"),
    ],
)
def test_resolve_mode(
    deployment: DeploymentConfig | None,
    parallel: ParallelConfig,
    environ: dict[str, str],
    mode: str,
) -> None:
    assert resolve_mode(deployment, parallel, environ) == mode


@pytest.mark.parametrize(
    ("deployment", "parallel", "environ", "message"),
    [
        (None, ONE, {"WORLD_SIZE": "two"}, "WORLD_SIZE must be an integer >= 1"),
        (DeploymentConfig.inline(), FOUR, {}, "'inline' must have one rank; got a replica of 4"),
        (DeploymentConfig(output_rank=4), FOUR, {}, r"output_rank must be in \[0, 4\)"),
        (
            DeploymentConfig(output_rank=2),
            ParallelConfig(cfg_size=2, tp_size=2),
            {},
            r"output_rank must be in \[0, 2\), the ranks with cfg rank 0; got 2",
        ),
        (DeploymentConfig(devices=(0, 1)), ONE, {}, "devices must hold replica_count"),
        (DeploymentConfig(replica_count=2), ONE, {"WORLD_SIZE": "2"}, "Unset WORLD_SIZE"),
    ],
)
def test_resolve_mode_refuses(
    deployment: DeploymentConfig | None,
    parallel: ParallelConfig,
    environ: dict[str, str],
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_mode(deployment, parallel, environ)
