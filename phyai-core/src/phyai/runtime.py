"""Import path of earlier releases; graphs live in phyai.graph."""

from phyai.graph import CudaGraph, CudaGraphRegistry, capture_on_stream

__all__ = ["CudaGraph", "CudaGraphRegistry", "capture_on_stream"]
