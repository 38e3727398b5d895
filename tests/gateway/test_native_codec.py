"""The native protocol's messages: frozen numbers, round trips, malformed and hostile bytes."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import (
    ITEM_SIZES,
    Fault,
    ImageData,
    InferReply,
    InferRequest,
    TensorData,
)
from phyai_gateway.proto import codec
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.contracts import contract_of
from phyai_gateway.proto.status import CODES, fault_of, metadata_of
from phyai_gateway.proto.wire import text_fields

FROZEN = {
    "HealthRequest": {"model_name": 1},
    "HealthResponse": {"healthy": 1},
    "Tensor": {"data": 1, "shape": 2, "dtype": 3},
    "Image": {"name": 1, "data": 2, "shape": 3, "dtype": 4, "encoding": 5, "layout": 6},
    "InferenceRequest": {
        "request_id": 1,
        "timestamp_ns": 2,
        "images": 3,
        "robot_state": 4,
        "instruction": 5,
        "requested_action_horizon": 6,
        "extensions_json": 7,
        "model_name": 8,
        "inputs": 9,
    },
    "InferenceResponse": {
        "request_id": 1,
        "actions": 2,
        "inference_time_us": 3,
        "extensions_json": 4,
        "outputs": 5,
    },
    "RegisterRequest": {"endpoint": 1, "model_name": 2},
    "RegisterResponse": {
        "accepted": 1,
        "server_id": 2,
        "heartbeat_interval_seconds": 3,
        "message": 4,
    },
    "HeartbeatRequest": {"server_id": 1},
    "HeartbeatResponse": {"registered": 1, "message": 2},
}
ENUMS = {
    "DataType": "UNSPECIFIED UINT8 INT32 INT64 FLOAT16 BFLOAT16 FLOAT32 FLOAT64 BOOL",
    "ImageEncoding": "UNSPECIFIED RAW JPEG PNG",
    "ImageLayout": "UNSPECIFIED HWC CHW",
}
PREFIXES = {
    "DataType": "DATA_TYPE",
    "ImageEncoding": "IMAGE_ENCODING",
    "ImageLayout": "IMAGE_LAYOUT",
}


def test_field_numbers_are_frozen() -> None:
    file = pb.DESCRIPTOR
    assert file.package == "robot.inference.v1"
    found = {
        name: {field.name: field.number for field in message.fields}
        for name, message in file.message_types_by_name.items()
    }
    assert found == FROZEN
    for name, values in ENUMS.items():
        wanted = [f"{PREFIXES[name]}_{value}" for value in values.split()]
        assert [value.name for value in file.enum_types_by_name[name].values] == wanted
        assert [value.number for value in file.enum_types_by_name[name].values] == list(
            range(len(wanted))
        )
    services = {s.name: [m.name for m in s.methods] for s in file.services_by_name.values()}
    assert services == {
        "ModelInference": ["Infer", "CheckHealth"],
        "ModelRegistry": ["Register", "Heartbeat"],
    }


def test_bytes_on_the_wire_are_frozen() -> None:
    """Written by hand after the format's definition, so that types cannot drift either."""
    tensor = b"\x0a\x01\x07\x12\x01\x01\x18\x01"
    image = b"\x0a\x01c\x12\x01\x09\x1a\x01\x01\x20\x01\x28\x01\x30\x01"
    entry = b"\x0a\x01t\x12" + bytes([len(tensor)]) + tensor
    wire = (
        b"\x0a\x02id\x10\x05"
        + b"\x1a" + bytes([len(image)]) + image
        + b"\x22" + bytes([len(tensor)]) + tensor
        + b"\x2a\x02go\x30\x03\x3a\x02{}\x42\x01m"
        + b"\x4a" + bytes([len(entry)]) + entry
    )  # fmt: skip
    found = codec.decode_request(wire)
    assert (found.request_id, found.timestamp_ns, found.horizon) == ("id", 5, 3)
    assert (found.instruction, found.model) == ("go", "m")
    assert found.images == (ImageData("c", b"\x09", (1,), "uint8", "raw", "hwc"),)
    assert found.state == TensorData(b"\x07", (1,), "uint8")
    assert found.inputs == {"t": TensorData(b"\x07", (1,), "uint8")}
    assert pb.InferenceRequest.FromString(codec.encode_request(found)).robot_state.dtype == 1


@pytest.mark.parametrize("dtype", sorted(ITEM_SIZES))
def test_every_dtype_makes_the_round_trip(dtype: str) -> None:
    data = bytes(range(6 * ITEM_SIZES[dtype]))
    tensor = TensorData(data, (2, 3), dtype)
    request = InferRequest("r", "m", inputs={"a": tensor, "b": TensorData(b"", (0,), dtype)})
    found = codec.decode_request(codec.encode_request(request))
    assert found.inputs == request.inputs
    reply = InferReply("r", actions=tensor, outputs={"x": tensor}, extensions={"control_hz": 20.0})
    assert codec.decode_reply(codec.encode_reply(reply)) == reply


def test_requests_make_the_round_trip() -> None:
    request = InferRequest(
        "r",
        "m",
        images=(
            ImageData("a", b"\xff\xd8", (), "uint8", "jpeg"),
            ImageData("b", bytes(6), (3, 1, 2), "uint8", "raw", "chw"),
        ),
        state=TensorData(bytes(8), (2,), "float32"),
        instructions=("x", "y"),
        horizon=4,
        options={"seed": 1, "rtc": {"prev_chunk": [[1.5]]}},
        extensions={"note": "n"},
        timestamp_ns=7,
    )
    assert codec.decode_request(codec.encode_request(request)) == request


def test_payloads_are_not_copied_when_they_are_bytes() -> None:
    picture = bytes(1000)
    assert codec._owned(picture) is picture
    assert codec._owned(memoryview(picture)) is picture
    assert codec._owned(memoryview(picture)[1:]) == picture[1:]


def test_names_are_read_past_any_payload() -> None:
    wire = codec.encode_request(
        InferRequest("the id", "the model", inputs={"x": TensorData(bytes(500), (500,), "uint8")})
    )
    assert text_fields(wire, (1, 8)) == {1: "the id", 8: "the model"}
    later = wire + b"\x0a\x01z"  # of a field given twice the last one counts, as in protobuf
    assert text_fields(later, (1,)) == {1: "z"}
    assert pb.InferenceRequest.FromString(later).request_id == "z"


@pytest.mark.parametrize(
    "wire",
    [
        b"\x0a\x05ab",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x0b",
        b"\x09\x01",
        b"\x0a",
        b"\x0a\x01\xff",
        b"\x00\x01",
        b"\x0a\x81\x10" + b"a" * 2049,
    ],
)
def test_malformed_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(Fault) as caught:
        text_fields(wire, (1, 8))
    assert caught.value.status == "invalid_argument"


def test_faults_survive_grpc() -> None:
    dropped = fault_of(grpc.StatusCode.CANCELLED, "CANCELLED", None)
    assert (dropped.status, dropped.started) == ("unavailable", True)
    for status in CODES:
        fault = Fault(status, "text", retry_after=0.25, started=True, reason="why")
        found = fault_of(CODES[status], fault.message, metadata_of(fault))
        assert (found.status, found.message, found.reason) == (status, "text", "why")
        assert (found.retry_after, found.started) == (0.25, True)
    # Of a server that says nothing more than its code:
    assert fault_of(grpc.StatusCode.UNAVAILABLE, "Socket closed", None).started
    assert fault_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory", None).started
    assert not fault_of(grpc.StatusCode.UNAVAILABLE, "failed to connect to all", None).started
    assert not fault_of(grpc.StatusCode.NOT_FOUND, "no model", None).started
    assert fault_of(grpc.StatusCode.UNKNOWN, None, None).status == "internal"
    assert fault_of(CODES["internal"], "x", [("grpc-retry-pushback-ms", "-1")]).retry_after is None


def test_contracts_travel_as_json() -> None:
    contract = ModelContract(
        "m",
        cameras={"a": (8, 8, 3), "b": None},
        optional_cameras=("b",),
        action_names=("x",),
        extra={"k": [1]},
    )
    text = json.dumps({**contract.to_json(), "of_a_later_version": 1})
    assert contract_of(text) == contract
    for bad in ("", "[1]", "{nope", '{"cameras": 3, "name": "m"}', "[" * 100_000):
        with pytest.raises(Fault) as caught:
            contract_of(bad)
        assert caught.value.status == "data_loss"


def test_small_messages_cannot_become_large_ones() -> None:
    """Fields cost protobuf and Python far more memory and time than they cost a sender."""
    shape = b"\x12\x51" + b"\x01" * 81
    tensor = shape + b"\x18\x01"
    entry = b"\x0a\x01t\x12" + bytes([len(tensor)]) + tensor
    many = b"\x10\x00" * 20_000
    for wire in (
        b"\x1a\x00" * 20_000,
        b"\x1a\x53\x1a\x51" + b"\x01" * 81,
        b"\x22" + bytes([len(tensor)]) + tensor,
        b"\x4a" + bytes([len(entry)]) + entry,
        b"\x22\xc0\xb8\x02" + many,
        (b"\x22\x80\x80\x01" + b"\x10\x00" * 8_192) * 3,
    ):
        with pytest.raises(Fault, match=r"fields|dims") as caught:
            codec.decode_request(wire)
        assert caught.value.status == "invalid_argument"
    with pytest.raises(Fault, match="fields"):
        text_fields(many, (1, 8))
    with pytest.raises(Fault) as caught:
        codec.decode_reply(b"\x2a" + bytes([len(entry)]) + entry)
    assert caught.value.status == "data_loss"


def test_generated_code_is_not_newer_than_the_oldest_protobuf_we_take() -> None:
    for module in (pb, contracts_pb):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert "# Protobuf Python Version: 6.31." in source
