"""The quick reading of names against the general one, on whole and on spoiled messages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_gateway.messages import Fault, ImageData, InferReply, InferRequest
from phyai_gateway.proto import codec, wire
from phyai_gateway.proto import robot_inference_v1_pb2 as pb

REQUEST = codec.encode_request(
    InferRequest(
        "request-1",
        "pi05",
        images=(ImageData("front", bytes(300), (10, 10, 3)),),
        instruction="go",
        timestamp_ns=1 << 60,
    )
)
REPLY = codec.encode_reply(InferReply("request-1", inference_time_us=300))


def by_fields(payload: bytes) -> tuple[dict[int, str], int] | str:
    """Return what the general reader finds: two texts and a number, or its refusal."""
    texts: dict[int, str] = {}
    number = 0
    try:
        for field, value in wire.fields(memoryview(payload)):
            if field in (wire.REQUEST_ID, wire.MODEL_NAME) and isinstance(value, memoryview):
                texts[field] = wire._text(value)
            elif field == wire.INFERENCE_TIME_US and isinstance(value, int):
                number = value
    except Fault as fault:
        return fault.status
    return texts, number


def quickly(payload: bytes) -> tuple[dict[int, str], int] | str:
    try:
        texts = wire.text_fields(payload, (wire.REQUEST_ID, wire.MODEL_NAME))
        name, number = wire.reply_fields(payload)
    except Fault as fault:
        return fault.status
    assert name == texts.get(wire.REQUEST_ID, "")
    return texts, number


SPOILS = st.lists(st.tuples(st.integers(0, len(REQUEST)), st.integers(0, 255)), max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([REQUEST, REPLY]), SPOILS, st.sampled_from([1, 2]))
def test_both_read_the_same_of_spoiled_messages(
    message: bytes, spoils: list[tuple[int, int]], part: int
) -> None:
    payload = bytearray(message)
    for place, value in spoils:
        payload[place % len(payload)] = value
    whole = bytes(payload[: len(payload) // part])
    assert quickly(whole) == by_fields(whole)


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=40))
def test_both_read_the_same_of_any_bytes(payload: bytes) -> None:
    assert quickly(payload) == by_fields(payload)


def test_pixels_may_be_any_buffer() -> None:
    pixels = bytes(range(12))
    forms = (pixels, bytearray(pixels), memoryview(pixels), memoryview(pixels * 2)[12:])
    strided = memoryview(
        bytes(value for pair in zip(pixels, pixels, strict=True) for value in pair)
    )
    for data in (*forms, strided[::2], memoryview(pixels).cast("B", (2, 2, 3)), b""):
        image = ImageData("front", data, (2, 2, 3))
        sent = codec.encode_request(InferRequest("r", "m", images=(image, image)))
        found = pb.InferenceRequest.FromString(sent)
        assert [one.data for one in found.images] == [bytes(data)] * 2
        assert [list(one.shape) for one in found.images] == [[2, 2, 3]] * 2
