"""Kernels in C++ for this CPU: compiled on first use, kept on disk, never required."""

from phyai.kernels.native.library import Library, available, built, library

__all__ = ["Library", "available", "built", "library"]
