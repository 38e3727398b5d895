"""What adapters check of a request: arrays of any kind, shapes, numbers of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.adapter import is_integer
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
    dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """Return ``value`` as a finite CPU tensor of ``shape`` (None = any size).

    dtype float32 accepts any floating type; int64 any integer type; bool only bool.
    """
    value = host_tensor(name, value)
    fits = value.ndim == len(shape) and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ["any" if n is None else n for n in shape]
        raise RequestError(f"{name} expected shape {wanted}; got {list(value.shape)}. Reshape it.")
    kinds = {
        torch.float32: value.is_floating_point(),
        torch.int64: not value.is_floating_point()
        and not value.is_complex()
        and value.dtype != torch.bool,
        torch.bool: value.dtype == torch.bool,
    }
    if dtype is not None and not kinds[dtype]:
        raise RequestError(
            f"{name} must be {str(dtype).removeprefix('torch.')}; "
            f"got {str(value.dtype).removeprefix('torch.')}. Convert it."
        )
    out: Tensor = value.to(dtype)
    if out.is_floating_point() and not bool(torch.isfinite(out).all()):
        raise RequestError(f"{name} must be finite; got NaN or infinity. Check the sender.")
    return out


def check_steps(num_steps: Any, default: int, most: int) -> int:
    """Return the number of solver steps; RequestError unless an integer in [1, most].

    >>> check_steps(None, 10, 1000)
    10
    """
    if num_steps is None:
        return default
    if not is_integer(num_steps):
        raise RequestError(f"num_steps must be an integer; got {num_steps!r}. Send a whole number.")
    if not 1 <= num_steps <= most:
        raise RequestError(f"num_steps must be in [1, {most}]; got {num_steps}. Change it.")
    return int(num_steps)


def common_steps(rows: Sequence[Mapping[str, Any]], default: int, most: int) -> int:
    """Return the number of solver steps all rows' options ask for.

    Raises: RequestError for a bad number, and when rows differ.
    """
    steps = [check_steps(row.get("num_steps"), default, most) for row in rows]
    if len(set(steps)) > 1:
        raise RequestError(
            f"option num_steps must be equal in all rows of a request; got {steps}. "
            "Send the rows as separate requests."
        )
    return steps[0]
