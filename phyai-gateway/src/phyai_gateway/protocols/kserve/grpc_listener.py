"""KServe v2 over gRPC: ``inference.GRPCInferenceService`` on a port of its own, with health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from phyai_gateway.messages import Fault
from phyai_gateway.proto import kserve_v2_pb2 as pb
from phyai_gateway.protocols.base import ListenerOptions, Router
from phyai_gateway.protocols.grpc_listener import Context, GrpcListener, Services
from phyai_gateway.protocols.kserve import grpc_decode as codec
from phyai_gateway.protocols.kserve.models import (
    Sequences,
    all_ready,
    check_version,
    describe,
    is_ready,
)
from phyai_gateway.version import VERSION

SERVICE = "inference.GRPCInferenceService"
GROWTH = 8  # of typed values, which take at most so many times their bytes once they are read
OFF_LOOP_BYTES = 1 << 20  # of typed values: turning those into bytes takes a while


class KserveGrpcListener(GrpcListener):
    """Takes no options.  Live and ready need no token; metadata and inference do."""

    name: ClassVar[str] = "kserve-grpc"
    default_port: ClassVar[int] = 8082
    shares_port: ClassVar[bool] = True

    def __init__(self, router: Router, options: ListenerOptions) -> None:
        super().__init__(router, options)
        if options.options:
            raise Fault(
                "invalid_argument", "kserve-grpc takes no options of its own. Leave them out."
            )
        self._off_loop = asyncio.Lock()  # more threads would only take turns, and the loop waits
        self._sequences = Sequences(options.limits.max_sessions)

    def services(self) -> Services:
        return {
            SERVICE: {
                "ServerLive": self.small(pb.ServerLiveRequest, self._live),
                "ServerReady": self.small(pb.ServerReadyRequest, self._ready),
                "ModelReady": self.small(pb.ModelReadyRequest, self._model_ready),
                "ServerMetadata": self.small(pb.ServerMetadataRequest, self._metadata, "infer"),
                "ModelMetadata": self.small(pb.ModelMetadataRequest, self._describe, "infer"),
                "ModelInfer": self.unary(self._infer),
            }
        }

    # ------------------------------------------------------------ calls

    def _live(self, request: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    def _ready(self, request: Any) -> Any:
        return pb.ServerReadyResponse(ready=not self.health.draining and all_ready(self.router))

    def _model_ready(self, request: Any) -> Any:
        check_version(request.version)
        if request.name not in self.router.models():
            raise Fault("not_found", f"no backend of model {request.name!r:.80} is known.")
        ready = not self.health.draining and is_ready(self.router, request.name)
        return pb.ModelReadyResponse(ready=ready)

    def _metadata(self, request: Any) -> Any:
        return pb.ServerMetadataResponse(name="phyai", version=VERSION)

    def _describe(self, request: Any) -> Any:
        check_version(request.version)
        return pb.ModelMetadataResponse(**describe(self.router.contract(request.name)))

    async def _infer(self, context: Context) -> bytes:
        headers = self.headers(context)
        principal = self.principal(headers)
        payload = await self.receive(context)
        with self.counted(len(payload)):
            message = self._checked(codec.parse, payload)
            typed = not message.raw_input_contents
            with self.counted(GROWTH * len(payload) if typed else 0):
                check_version(message.model_version)
                contract = self.router.contract(message.model_name)
                if typed and len(payload) >= OFF_LOOP_BYTES:
                    read = partial(self._checked, codec.decode, message, contract)
                    async with self._off_loop:
                        decoded = await asyncio.to_thread(read)
                    del read
                else:
                    decoded = self._checked(codec.decode, message, contract)
                del message  # it holds the tensors a second time
                asked = self._sequences.numbered(decoded.request)
                reply = await self.router.infer(asked, self.call_of(context, headers, principal))
                self._sequences.answered(asked, decoded.ends)
                answer = codec.encode(reply, decoded)
        self.options.observer.transferred("out", len(answer))
        return answer

    def _checked(self, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except Fault as fault:
            if fault.status == "invalid_argument":
                self.options.observer.decode_error(self.name, "content")
            raise
