"""Host-side processing: images, prompts, statistics, robot contracts."""

from phyai.models.pi.processing.processor import PiRow, Processor

__all__ = ["PiRow", "Processor"]
