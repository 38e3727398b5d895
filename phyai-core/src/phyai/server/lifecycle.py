"""Earlier import path; the error is in ``phyai.errors``."""

from phyai.errors import EngineUnavailableError as EngineUnavailableError
