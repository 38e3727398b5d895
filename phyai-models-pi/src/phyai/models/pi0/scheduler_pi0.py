"""Import path of earlier releases; the request lives in main_pi0."""

from phyai.models.pi0.main_pi0 import PI0Request

__all__ = ["PI0Request"]
