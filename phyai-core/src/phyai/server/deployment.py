"""Earlier import path; the code is in ``phyai.deployment``."""

from phyai.deployment import DeploymentConfig as DeploymentConfig
from phyai.deployment import WorkerSupervisorConfig as WorkerSupervisorConfig
