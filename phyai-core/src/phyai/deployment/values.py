"""Values between processes: a structural codec of plain data, arrays, tensors and dataclasses.

The body is JSON: numbers, texts, true, false and null are themselves, anything else is a list that
begins with a tag. The bytes of arrays, tensors and ``bytes`` are beside it, by index. Nothing in a
body names code to run: classes are looked up, checked for their kind and filled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from phyai.deployment.value_classes import text_of
from phyai.deployment.value_decoder import Decoder, WorkerTraceback
from phyai.deployment.value_encoder import Encoder, Refused, lower_error
from phyai.errors import PhyaiError, RequestError

__all__ = [
    "WireError", "WorkerTraceback", "decode", "decode_error", "encode", "encode_error",
]  # fmt: skip

_TRAVELS = (
    "None, numbers, text, bytes, lists, tuples, mappings, sets, numpy arrays, dense CPU or CUDA "
    "tensors, dtypes, paths, enum members, dataclasses, named tuples and exceptions travel"
)
_to_json = json.JSONEncoder(check_circular=False, ensure_ascii=False, separators=(",", ":")).encode


class WireError(PhyaiError, RuntimeError):
    """Bytes from another process that are no message of ours; the sender is not to be trusted."""


def encode(value: Any, *, where: str = "request") -> tuple[bytes, list[memoryview]]:
    """Return the value as a small body plus the bytes of its arrays, one C-contiguous buffer each.

    Buffers are views of the value's own memory where it is contiguous: send them before it changes.
    Any mapping arrives as a dict, a Parameter as a plain tensor, a pure path as a Path.
    Raises: RequestError for what cannot travel; the text names its type and its place.

    >>> import numpy as np
    >>> from phyai.deployment.values import decode, encode
    >>> body, buffers = encode({"state": np.zeros(3, np.float32), "seed": 7})
    >>> len(buffers), decode(body, buffers)["seed"]
    (1, 7)
    """
    encoder = Encoder()
    try:
        tree = encoder.lower(value)
    except Refused as refused:
        place = where + "".join(reversed(refused.place))
        raise RequestError(
            f"{place} must be able to travel to another process; got {refused.what}. "
            f"Convert it: {_TRAVELS}."
        ) from None
    return _body(tree), encoder.buffers


def decode(body: bytes, buffers: Sequence[memoryview] = (), *, copy: bool = True) -> Any:
    """Return the value again; no constructor, ``__reduce__`` or ``__setstate__`` is called.

    copy: True gives arrays fresh memory; False makes them views of ``buffers``.
    Raises: WireError for a body or buffers that ``encode`` did not make, or a class that is no
    dataclass, named tuple, enum or exception here.
    """
    try:
        tree = json.loads(str(body, "utf-8", "surrogatepass"))
        return Decoder(buffers, copy).build(tree)
    except (  # what reading made-up bytes can raise; a MemoryError or a device's error stays itself
        TypeError, ValueError, LookupError, AttributeError, ImportError, RecursionError,
    ) as error:  # fmt: skip
        raise WireError(
            f"A value from another process must be one that encode() made; got {len(body)} bytes "
            f"and {len(buffers)} buffers: {error}. Run the same phyai on both sides."
        ) from error


def encode_error(error: BaseException) -> tuple[bytes, list[memoryview]]:
    """Return an error with type, args, attributes (``reason``) and traceback text; never raises."""
    encoder = Encoder()
    return _body(lower_error(encoder, error)), encoder.buffers


def decode_error(body: bytes, buffers: Sequence[memoryview] = ()) -> Exception:
    """Return the error; its ``__cause__`` is a WorkerTraceback with the traceback's text.

    One whose class is unknown here, cannot be rebuilt or is no Exception (SystemExit, ...) comes as
    a RuntimeError whose text names the original type.
    Raises: WireError for bytes that ``encode_error`` did not make.
    """
    error = decode(body, buffers)
    if isinstance(error, Exception):
        return error
    if not isinstance(error, BaseException):
        raise WireError(f"An error must arrive as one; got {type(error).__name__}. Ask for help.")
    plain = RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    plain.__cause__ = error.__cause__
    return plain


def _body(tree: Any) -> bytes:
    # Half surrogates stay what they are; escaped, two of them would come back as one character.
    return _to_json(tree).encode("utf-8", "surrogatepass")
