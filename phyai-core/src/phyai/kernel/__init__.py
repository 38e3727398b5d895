"""Earlier import path; the code is in ``phyai.engine_config`` and ``phyai.kernels``."""

from phyai.engine_config import KernelConfig as KernelConfig
