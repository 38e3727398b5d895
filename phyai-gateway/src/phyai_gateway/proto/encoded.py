"""Requests and replies that travel as the bytes they came in, unread but for their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phyai_gateway.messages import Fault, InferReply, InferRequest
from phyai_gateway.proto import codec
from phyai_gateway.proto.wire import MODEL_NAME, REQUEST_ID, reply_fields, text_fields


@dataclass(frozen=True, slots=True)
class EncodedRequest(InferRequest):
    """A serialised InferenceRequest; only ``request_id`` and ``model`` of it have been read.

    options: what the transport says beside the message, such as the session id for routing.
    """

    payload: bytes = b""

    @classmethod
    def scan(
        cls, payload: bytes, default_model: str, options: Mapping[str, Any] | None = None
    ) -> EncodedRequest:
        """Return the request in ``payload``; raises Fault(invalid_argument) for no message."""
        found = text_fields(payload, (REQUEST_ID, MODEL_NAME))
        return cls(
            request_id=found.get(REQUEST_ID, ""),
            model=found.get(MODEL_NAME, "") or default_model,
            options=options or {},
            payload=payload,
        )

    def with_fields(self) -> EncodedRequest:
        """Return the same request with every field read; raises Fault(invalid_argument)."""
        read = decoded(self)
        values = {field.name: getattr(read, field.name) for field in fields(InferRequest)}
        return EncodedRequest(**values, payload=self.payload)


@dataclass(frozen=True, slots=True)
class EncodedReply(InferReply):
    """A serialised InferenceResponse; only ``request_id`` and ``inference_time_us`` are read."""

    payload: bytes = b""

    @classmethod
    def scan(cls, payload: bytes) -> EncodedReply:
        """Return the reply in ``payload``; raises Fault(data_loss) for no message."""
        try:
            name, microseconds = reply_fields(payload)
        except Fault as error:
            raise Fault("data_loss", f"Server's reply cannot be read: {error.message}") from error
        return cls(request_id=name, inference_time_us=microseconds, payload=payload)


def decoded(request: InferRequest) -> InferRequest:
    """Return a request with its fields read, model and transport options filled in.

    Raises: Fault(invalid_argument) naming the field that is wrong.
    """
    if not isinstance(request, EncodedRequest):
        return request
    read = codec.decode_request(request.payload)
    values = {field.name: getattr(read, field.name) for field in fields(InferRequest)}
    values["model"] = read.model or request.model
    values["options"] = {**request.options, **read.options}
    return InferRequest(**values)


def payload_of(request: InferRequest) -> bytes:
    """Return the serialised form of a request; the bytes themselves when it came as such."""
    if isinstance(request, EncodedRequest):
        return request.payload
    return codec.encode_request(request)


def reply_payload(reply: InferReply) -> bytes:
    """Return the serialised form of a reply."""
    return reply.payload if isinstance(reply, EncodedReply) else codec.encode_reply(reply)
