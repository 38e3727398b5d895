"""Float32 convolutions that keep float32's bits on a GPU too.

cuDNN may round their operands to 10 bits (TF32), and by default it does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_EXACT = "ieee"
_lock = threading.Lock()
_inside = 0
_before = _EXACT


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Have convolutions computed in full; other dtypes than float32 are as always.

    The setting is the process's: the last thread to leave puts back what the first one found.

    >>> with exact_convolutions():
    ...     torch.backends.cudnn.conv.fp32_precision
    'ieee'
    """
    global _inside, _before
    cudnn: Any = torch.backends.cudnn
    setting = cudnn.conv
    with _lock:
        if not _inside:
            _before = setting.fp32_precision
            setting.fp32_precision = _EXACT
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                setting.fp32_precision = _before
