"""Names of the precisions, and the dtypes they mean."""

from __future__ import annotations

import torch

from phyai.errors import ConfigError, did_you_mean

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIASES = {"float32": "fp32", "bfloat16": "bf16"}


def dtype_named(name: str) -> torch.dtype | None:
    """Return the dtype of a precision's name or alias; None for an unknown one.

    >>> dtype_named("bfloat16"), dtype_named("int8")
    (torch.bfloat16, None)
    """
    return PRECISIONS.get(ALIASES.get(name, name))


def choose_dtype(precision: str | None, engine_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a model runs in, by the name of a precision or else the engine's.

    Raises: ConfigError for an unknown name or a dtype there is no policy for.
    """
    if precision is not None:
        dtype = dtype_named(precision)
        if dtype is None:
            known = sorted([*PRECISIONS, *ALIASES])
            raise ConfigError(
                f"precision must be one of {', '.join(known)}; got {precision!r}."
                + did_you_mean(precision, known)
            )
        return dtype
    if engine_dtype not in PRECISIONS.values():
        raise ConfigError(
            f"params_dtype must be float32 or bfloat16 for this model; got {engine_dtype}. "
            "Set config.device.params_dtype or precision."
        )
    return engine_dtype
