"""Deployment: how many complete copies of the model run, and where."""

from __future__ import annotations

from phyai.deployment.config import (
    DeploymentConfig,
    WorkerSupervisorConfig,
    replica_devices,
    resolve_mode,
)

__all__ = ["DeploymentConfig", "WorkerSupervisorConfig", "replica_devices", "resolve_mode"]
