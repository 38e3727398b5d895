"""Earlier import path; the code is in ``phyai.engine_config``."""

from phyai.engine_config import KernelConfig as KernelConfig
