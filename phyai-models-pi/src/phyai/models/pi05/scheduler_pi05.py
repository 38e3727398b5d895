"""Import path of earlier releases; the request lives in main_pi05."""

from phyai.models.pi05.main_pi05 import PI05Request

__all__ = ["PI05Request"]
