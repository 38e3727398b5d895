"""Outcomes of a batch on its ranks: whether they are alike, and where they differ in words."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from phyai.errors import ActionRejected, EngineUnavailableError
from phyai.joining import Failed

_TEXT = 400  # bytes of a rank's error in the text of all ranks' errors


def digest(error: BaseException | None, result: Any) -> int:
    """Return a number that is alike for outcomes of the same kind: types of errors, by place.

    What a validator refused counts as a result: only the output rank has it judged.
    """
    kinds = [_kind(error)]
    if isinstance(result, list):
        kinds += ["" if one is None or is_judged(one) else _kind(one) for one in _errors(result)]
    return zlib.crc32(repr(kinds).encode())


def refused(result: Any) -> list[BaseException | None]:
    """Return what validators refused, by place; None for the others."""
    found = _errors(result) if isinstance(result, list) else []
    return [one if one is not None and is_judged(one) else None for one in found]


def is_judged(error: BaseException) -> bool:
    """Return whether a validator refused the chunk, rather than core's own checks."""
    return isinstance(error, ActionRejected) and error.validator is not None


def as_text(error: BaseException | None) -> Tensor:
    """Return an error in words, as bytes [400]."""
    words = "no error" if error is None else f"{type(error).__name__}: {error}"
    data = words.encode()[:_TEXT].ljust(_TEXT, b"\0")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def different(texts: Iterable[Tensor]) -> EngineUnavailableError:
    """Return the error of ranks whose outcomes differ: each in words, in order."""
    shown = "; ".join(
        f"rank {rank}: {bytes(text.tolist()).rstrip(bytes(1)).decode(errors='replace')}"
        for rank, text in enumerate(texts)
    )
    return unlike(shown)


def unlike(shown: str) -> EngineUnavailableError:
    """Return the error of a replica that ends because its ranks are no longer alike."""
    return EngineUnavailableError(
        f"all ranks of a replica must have the same outcome; got {shown}. Start all ranks again.",
        reason="poisoned",
    )


def _errors(result: list[Any]) -> list[BaseException | None]:
    return [one.error if isinstance(one, Failed) else None for one in result]


def _kind(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__module__}.{type(error).__qualname__}"
