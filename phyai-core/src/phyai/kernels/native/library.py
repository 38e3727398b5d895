"""The loaded library: found or compiled once per process, then plain functions."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

import torch

from phyai import env
from phyai.errors import KernelUnavailable
from phyai.kernels.native.build import build, compilers, kept

log = logging.getLogger("phyai.kernels")


class Library:
    """The C functions of one compiled library; ``isa`` says what it was compiled for."""

    def __init__(self, path: Path) -> None:
        _load_openmp()
        self.path = path
        self.functions = ctypes.CDLL(str(path))
        isa = self.functions.phyai_isa
        isa.restype = ctypes.c_char_p
        self.isa: str = isa().decode()

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:
        function: ctypes._NamedFuncPointer = getattr(self.functions, name)
        return function


@functools.cache
def library() -> Library:
    """Return this process's library.

    Raises: KernelUnavailable when it cannot be compiled, loaded or does not pass its check.
    """
    folder = env.cache_dir() / "native"
    path = build(folder)
    try:
        return Library(path)
    except (OSError, AttributeError) as error:
        log.warning("the native kernels in %s cannot be loaded and are made anew: %s", path, error)
    try:
        path.unlink(missing_ok=True)
        return Library(build(folder))
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(
            f"native kernels must load after they were compiled; got {error}. Go on without."
        ) from error


def built() -> bool:
    """Return whether ``library`` has nothing to compile: it is on disk, or cannot be made."""
    try:
        return kept(env.cache_dir() / "native") is not None or not compilers(os.environ)
    except (KernelUnavailable, OSError):
        return True


@functools.cache
def available() -> bool | str:
    """Return True, or why there are no native kernels; the reason is logged once."""
    try:
        library()
    except KernelUnavailable as error:
        log.warning("no native kernels: %s", error)
        return str(error)
    return True


def _load_openmp() -> None:
    """Make the OpenMP runtime of torch visible, so that there is one pool of threads, not two."""
    torch.get_num_threads()
    for path in sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
