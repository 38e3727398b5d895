"""Takes what a caller calls an array: a tensor of any device, an array of any layout, a list."""

from __future__ import annotations

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
