"""Initial noise as the official policy server draws it: one numpy generator per modality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.adapter import is_integer
from phyai.errors import RequestError

_SEEDS = 2**32


def modality_noise(shape: Sequence[int], seed: Any) -> Tensor:
    """Return standard normal noise [*shape] float32 of its own generator.

    Every modality of a request starts a generator at the same seed, clean parts included.
    seed: None draws one from the system.
    Raises: RequestError for a seed outside [0, 2^32).

    >>> bool(torch.equal(modality_noise((2, 3), 0), modality_noise((3, 2), 0).view(2, 3)))
    True
    """
    if seed is not None and (not is_integer(seed) or not 0 <= seed < _SEEDS):
        raise RequestError(
            f"seed must be an integer in [0, 2^32); got {seed!r}. Send such a number."
        )
    generator = np.random.RandomState(None if seed is None else int(seed))
    return torch.from_numpy(generator.standard_normal(tuple(shape)).astype(np.float32))
