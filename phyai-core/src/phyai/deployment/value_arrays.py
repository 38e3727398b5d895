"""Arrays and tensors between processes: plain description and bytes, and back again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import reductions

_KINDS = "biufcmMSU"  # numpy kinds whose bytes say all: no objects, no records
_MAX_ITEMS = 1 << 56  # strides in bytes fit 64 bits even when another dim is 0
_DEVICE_CLASSES = ((0, torch.Tensor), (4, torch.storage.TypedStorage))
"""Where torch's own description of a shared CUDA tensor names a class, and which."""


def bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the bytes of an array in C order: its own memory when that is contiguous."""
    if not array.nbytes:
        return memoryview(b"")
    octets: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(octets)


def describe_array(array: np.ndarray[Any, Any]) -> tuple[str, list[int], memoryview]:
    """Return dtype, shape and bytes. Raises: TypeError for object and record dtypes."""
    if type(array) is not np.ndarray and not isinstance(array, np.memmap):
        raise TypeError("of a subclass that numpy.asarray would lose")
    check_dtype(array.dtype)
    return array.dtype.str, list(array.shape), bytes_of(array)


def check_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return a dtype whose bytes are plain data; TypeError for any other."""
    if dtype.kind not in _KINDS:
        raise TypeError(f"of dtype {dtype}")
    return dtype


def build_array(
    dtype: str, shape: Sequence[int], data: memoryview, copy: bool
) -> np.ndarray[Any, Any]:
    """Return the array; ValueError when the bytes do not fill it exactly."""
    kind = _plain_dtype(dtype)
    _check_size(shape, kind.itemsize, data)
    if not data.nbytes:
        return np.empty(shape, kind)
    view = np.frombuffer(data, kind).reshape(shape)
    return view.copy() if copy else view


@functools.lru_cache(maxsize=128)
def _plain_dtype(name: str) -> np.dtype[Any]:
    return check_dtype(np.dtype(name))


def describe_tensor(tensor: Tensor) -> tuple[str, list[int], memoryview]:
    """Return dtype, shape and bytes of a dense CPU tensor. Raises: TypeError for any other."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError("that is sparse, nested or quantized")
    if tensor.device.type != "cpu":
        raise TypeError(f"on device {tensor.device}")
    try:
        dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    except NotImplementedError as error:
        raise TypeError(f"of dtype {tensor.dtype}, which torch cannot copy") from error
    data = memoryview(b"")
    if dense.numel():
        octets: Any = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy()
        data = memoryview(octets)
    return dtype_name(tensor.dtype), list(tensor.shape), data


def build_tensor(dtype: str, shape: Sequence[int], data: memoryview, copy: bool) -> Tensor:
    """Return the tensor; ValueError when the bytes do not fill it exactly."""
    kind = dtype_of(dtype)
    _check_size(shape, kind.itemsize, data)
    if copy or not data.nbytes:
        out = torch.empty(tuple(shape), dtype=kind)
        if data.nbytes:
            out.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        return out
    return torch.from_numpy(np.frombuffer(data, np.uint8)).view(kind).view(tuple(shape))


def _check_size(shape: Sequence[int], item: int, data: memoryview) -> None:
    count = space = 1
    for size in shape:
        if type(size) is not int or size < 0:
            raise ValueError(f"an array of shape {shape!r}")
        count *= size
        space *= size or 1
    if space > _MAX_ITEMS or count * item != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes for an array of shape {shape!r} x {item} bytes")


def describe_shared(tensor: Tensor) -> list[Any]:
    """Return plain values from which another process of this host opens a CUDA tensor's memory."""
    rebuild, args = reductions.reduce_tensor(tensor.detach())  # type: ignore[no-untyped-call]
    if rebuild is not reductions.rebuild_cuda_tensor:
        raise TypeError(f"on device {tensor.device}")
    classes = {place for place, _ in _DEVICE_CLASSES}
    return [value for place, value in enumerate(args) if place not in classes]


def open_shared(values: Sequence[Any], copy: bool) -> Tensor:
    """Return the CUDA tensor; copy: in this process's own device memory."""
    args = list(values)
    for place, cls in _DEVICE_CLASSES:
        args.insert(place, cls)
    tensor: Tensor = reductions.rebuild_cuda_tensor(*args)  # type: ignore[no-untyped-call]
    return tensor.clone() if copy else tensor


def build_device(name: str) -> torch.device:
    """Return a torch device by its name; ValueError for no device's."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"no torch device {name!r}") from error


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return a torch dtype by its name; ValueError for any other attribute of torch."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no torch dtype {name!r}")
    return found
