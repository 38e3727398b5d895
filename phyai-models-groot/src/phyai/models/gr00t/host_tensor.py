"""Takes what a caller calls an array: a tensor of any device, an array of any layout, a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.errors import RequestError


def host_tensor(name: str, value: Any) -> Tensor:
    """Return a dense CPU tensor that shares no memory with an array of the caller.

    Raises: RequestError for a tensor without plain data and for anything that holds no numbers.
    """
    try:
        if isinstance(value, Tensor):
            host = value.detach().to("cpu")
            if host.layout != torch.strided or host.is_quantized:
                raise TypeError("it is sparse or quantized")
            return host
        if isinstance(value, np.ndarray):  # torch takes no foreign byte order or negative stride
            return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a meta tensor's too
        raise RequestError(
            f"{name} must be a dense tensor or array of numbers; got {type(value).__name__}: "
            f"{error}. Convert it."
        ) from error


def checked(
    name: str,
    value: Any,
    shape: Sequence[int | None],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return ``value`` as a finite CPU tensor of ``shape`` (None = any size).

    dtype float32 accepts any floating type; int64 any integer type.
    """
    value = host_tensor(name, value)
    fits = value.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ["any" if n is None else n for n in shape]
        raise RequestError(f"{name} expected shape {wanted}; got {list(value.shape)}.")
    floats = value.is_floating_point()
    integers = not floats and not value.is_complex() and value.dtype != torch.bool
    if not (floats if dtype == torch.float32 else integers):
        raise RequestError(
            f"{name} must be {str(dtype).removeprefix('torch.')}; "
            f"got {str(value.dtype).removeprefix('torch.')}."
        )
    out: Tensor = value.to(dtype)
    if floats and not bool(torch.isfinite(out).all()):
        raise RequestError(f"{name} must be finite; got NaN or infinity. Check the sender.")
    return out
