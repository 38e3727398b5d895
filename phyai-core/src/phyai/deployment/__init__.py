"""Deployment: how many complete copies of the model run, and where."""

from __future__ import annotations

from phyai.deployment.config import (
    DeploymentConfig,
    WorkerSupervisorConfig,
    replica_devices,
    resolve_mode,
)
from phyai.deployment.ray_config import RayConfig

__all__ = [
    "DeploymentConfig",
    "RayConfig",
    "WorkerSupervisorConfig",
    "replica_devices",
    "resolve_mode",
]
