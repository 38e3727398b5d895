"""Reads single fields of a serialised message without parsing the rest, and bounds the rest.

What a router needs of a request are two short strings; payload bytes are stepped over. Before a
whole message is parsed its parts are counted: protobuf's objects take many times the bytes of
small fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from phyai_gateway.messages import Bytes, Fault

REQUEST_ID = 1  # of InferenceRequest and of InferenceResponse
MODEL_NAME = 8  # of InferenceRequest
INFERENCE_TIME_US = 3  # of InferenceResponse
MAX_NAME_BYTES = 1024
MAX_FIELDS = 10_000  # of a message, those of its parts included; a real one has some dozens
MAX_SHAPE_BYTES = 80  # 8 dims as varints

# Which fields hold a tensor, an image or a map entry with a tensor, and where those have a shape.
REQUEST_PARTS = {3: "image", 4: "tensor", 9: "entry"}
REPLY_PARTS = {2: "tensor", 5: "entry"}
_SHAPES = {"image": 3, "tensor": 2, "entry": 0}
_NESTED: Mapping[str, Mapping[int, str]] = {"image": {}, "tensor": {}, "entry": {2: "tensor"}}

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def text_fields(payload: Bytes, wanted: tuple[int, ...]) -> dict[int, str]:
    """Return the wanted top-level string fields; absent ones are left out, the last one counts.

    Raises: Fault(invalid_argument) for bytes that are no message, or a text that is no UTF-8 or
    longer than ``MAX_NAME_BYTES``.

    >>> text_fields(bytes([0x0A, 1, 0x61, 0x10, 7]), (1,))
    {1: 'a'}
    """
    found, _ = _named(payload, wanted)
    return found


def reply_fields(payload: Bytes) -> tuple[str, int]:
    """Return request id and inference time (us) of an InferenceResponse; raises as above."""
    texts, microseconds = _named(payload, (REQUEST_ID,), INFERENCE_TIME_US)
    return texts.get(REQUEST_ID, ""), microseconds


def _named(payload: Bytes, texts: tuple[int, ...], number: int = 0) -> tuple[dict[int, str], int]:
    """Return single fields as ``fields`` gives them, without its generator and its views.

    Every request and every reply comes by here.
    """
    found: dict[int, str] = {}
    counted = 0
    at, end, left = 0, len(payload), MAX_FIELDS
    while at < end:
        left -= 1
        if left < 0:
            raise _too_many()
        tag = payload[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(payload, at - 1)
        kind = tag & 7
        if kind == _LENGTH:
            size = payload[at] if at < end else 0x80
            at += 1
            if size >= 0x80:
                size, at = _varint(payload, at - 1)
            if tag >> 3 in texts:
                found[tag >> 3] = _text(memoryview(payload)[at : at + size])
            at += size
        elif kind == _VARINT:
            value, at = _varint(payload, at)
            if tag >> 3 == number:
                counted = value
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:  # groups left the format long ago
            raise _malformed()
        if tag < 8 or at > end:
            raise _malformed()
    return found, counted


def check_parts(payload: Bytes, parts: Mapping[int, str]) -> None:
    """Refuse a message whose parsed form would be much larger than its bytes.

    Raises: Fault(invalid_argument) for too many fields or a shape of too many dims.
    """
    _count_parts(memoryview(payload), parts, MAX_FIELDS)


def _count_parts(view: memoryview, parts: Mapping[int, str], left: int) -> int:
    """Return how many fields may still come after those of ``view``."""
    for field, value in fields(view):
        left -= 1
        kind = parts.get(field)
        if kind is None or not isinstance(value, memoryview):
            continue
        shape = _SHAPES[kind]
        for inner, inside in fields(value):
            left -= 1
            if inner == shape and isinstance(inside, memoryview) and len(inside) > MAX_SHAPE_BYTES:
                raise Fault("invalid_argument", "shape must have at most 8 dims; got more.")
        if nested := _NESTED[kind]:
            left = _count_parts(value, nested, left)
        if left < 0:
            raise _too_many()
    return left


def fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Give number and value of every top-level field, values of fixed size as 0."""
    at, end, left = 0, len(view), MAX_FIELDS
    while at < end:
        left -= 1
        if left < 0:  # each one costs Python far more than its two bytes cost the sender
            raise _too_many()
        tag, at = _varint(view, at)
        field, kind = tag >> 3, tag & 7
        value: int | memoryview = 0
        if kind == _LENGTH:
            size, at = _varint(view, at)
            if size > end - at:
                raise _malformed()
            value = view[at : at + size]
            at += size
        elif kind == _VARINT:
            value, at = _varint(view, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:  # groups left the format long ago
            raise _malformed()
        if field == 0 or at > end:
            raise _malformed()
        yield field, value


def _varint(view: Bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            break
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _malformed()


def varint(value: int) -> bytes:
    """Return a number as it precedes a field of that many bytes.

    >>> varint(300)
    b'\\xac\\x02'
    """
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(view: memoryview) -> str:
    if len(view) > MAX_NAME_BYTES:
        raise Fault(
            "invalid_argument",
            f"request_id and model_name must have at most {MAX_NAME_BYTES} bytes; got {len(view)}. "
            "Send shorter ones.",
        )
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError:
        raise _malformed() from None


def _too_many() -> Fault:
    return Fault(
        "invalid_argument", f"message must have at most {MAX_FIELDS} fields; got more. Split it."
    )


def _malformed() -> Fault:
    return Fault(
        "invalid_argument",
        "message must be a robot.inference.v1 protobuf; got bytes that cannot be parsed. Check "
        "the client's message definition.",
    )
