"""The loaded library: found or compiled once per process, then plain functions."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch

from phyai import env
from phyai.errors import KernelUnavailable
from phyai.kernels.native.build import build, path_of

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

    Raises: KernelUnavailable when it cannot be compiled or does not pass its check.
    """
    return Library(build(env.cache_dir() / "native"))


def built() -> bool:
    """Return whether ``library`` has nothing to compile: it is on disk, or cannot be made."""
    try:
        return path_of(env.cache_dir() / "native").is_file()
    except KernelUnavailable:
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
