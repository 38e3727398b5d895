"""The client for programs with an event loop; as ``Client``, with ``await``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import grpc
import numpy as np

from phyai_gateway.client.channel import (
    CONTRACT,
    DEFAULT_TIMEOUT_S,
    HEALTH,
    INFER,
    Target,
    check_timeout,
    fault_from,
)
from phyai_gateway.client.errors import ServingError, error_of
from phyai_gateway.client.messages import (
    Answer,
    Picture,
    actions_of,
    answer_of,
    encoded,
    request_of,
    tensor_request_of,
)
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.proto import contracts_v1_pb2 as contracts_pb
from phyai_gateway.proto import robot_inference_v1_pb2 as pb
from phyai_gateway.proto.contracts import contract_of

T = TypeVar("T")


class AsyncClient:
    """One model of a server or gateway; arguments as of ``Client``. Cancelling gives up the work.

    >>> client = AsyncClient("127.0.0.1:50063", model="pi05")
    """

    def __init__(
        self,
        address: str,
        *,
        model: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        token: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        robot: str | None = None,
    ) -> None:
        self.model, self.timeout_s = model, check_timeout(timeout_s)
        self._target = Target(address, token, ca, cert, key, robot)
        self._channel: Any = None

    async def infer(
        self,
        images: Mapping[str, Picture],
        state: Any = None,
        prompt: str | Sequence[str] | None = None,
        *,
        horizon: int = 0,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> np.ndarray[Any, Any]:
        """Return float32 actions [H, A] or [B, H, A]; see ``Client.infer``."""
        answer = await self.ask(
            images, state, prompt, horizon=horizon, options=options, timeout_s=timeout_s
        )
        return _told(lambda: actions_of(answer))

    async def ask(
        self,
        images: Mapping[str, Picture],
        state: Any = None,
        prompt: str | Sequence[str] | None = None,
        *,
        horizon: int = 0,
        options: Mapping[str, Any] | None = None,
        extensions: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """As ``infer``, and return everything the server answers; see ``Client.ask``."""
        request = _told(
            lambda: request_of(
                self.model,
                images,
                state,
                prompt,
                horizon=horizon,
                options=options,
                extensions=extensions,
            )
        )
        return await self._ask(request, timeout_s)

    async def infer_tensors(
        self,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a model served as raw tensors; no action guard sees them."""
        request = _told(lambda: tensor_request_of(self.model, inputs, parameters))
        return (await self._ask(request, timeout_s)).outputs

    async def contract(self, *, timeout_s: float | None = None) -> ModelContract:
        """Return what the model takes and gives; raises ServingError."""
        message = contracts_pb.ContractRequest(model_name=self.model)
        raw = await self._call(CONTRACT, message.SerializeToString(), timeout_s)
        text = contracts_pb.ContractResponse.FromString(raw).contract_json
        return _told(lambda: contract_of(text))

    async def ready(self, *, timeout_s: float = 2.0) -> bool:
        """Return whether the model takes requests now; False also when nobody answers."""
        message = pb.HealthRequest(model_name=self.model)
        try:
            raw = await self._call(HEALTH, message.SerializeToString(), timeout_s)
        except ServingError:
            return False
        return bool(pb.HealthResponse.FromString(raw).healthy)

    async def close(self) -> None:
        """Close the connection; requests under way fail."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _ask(self, request: InferRequest, timeout_s: float | None) -> Answer:
        payload = _told(lambda: encoded(request))
        raw = await self._call(INFER, payload, timeout_s)
        return _told(lambda: answer_of(request, raw))

    async def _call(self, method: str, payload: bytes, timeout_s: float | None) -> bytes:
        timeout = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        if self._channel is None:  # belongs to the running loop
            self._channel = self._target.open(grpc.aio)
        call = self._channel.unary_unary(method)
        try:
            raw: bytes = await call(payload, timeout=timeout, metadata=self._target.metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(fault_from(error)) from None
        return raw


def _told(make: Callable[[], T]) -> T:
    """Return what ``make`` does, its faults as this client's exceptions."""
    try:
        return make()
    except Fault as fault:
        raise error_of(fault) from fault
