"""The client for programs without an event loop; threads may share one."""

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


class Client:
    """One model of a server or gateway at ``HOST:PORT``.

    timeout_s: of a request, 600 at most; there is no answer after it.  model: may be "" for a
    server with one model.  token, ca, cert, key, robot: see ``Target``.

    >>> Client("127.0.0.1:50063", model="pi05").close()
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
        self._channel = self._target.open(grpc)

    def infer(
        self,
        images: Mapping[str, Picture],
        state: Any = None,
        prompt: str | Sequence[str] | None = None,
        *,
        horizon: int = 0,
        options: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> np.ndarray[Any, Any]:
        """Return float32 actions [H, A], or [B, H, A] for a batch, in robot units.

        images: uint8 RGB [H, W, 3] by camera, or bytes of a JPEG or PNG.  state: [D].  For a
        batch every array has a row dim and prompt is a list.  horizon: rows wanted, 0 = all.
        options: seed, num_steps, session_id, seq, ...
        Raises: ServingError.
        """
        answer = self.ask(
            images, state, prompt, horizon=horizon, options=options, timeout_s=timeout_s
        )
        return _told(lambda: actions_of(answer))

    def ask(
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
        """As ``infer``, and return everything the server answers.

        extensions: ``{"return_model_actions": True}`` also asks for what option rtc needs next.
        """
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
        return self._ask(request, timeout_s)

    def infer_tensors(
        self,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a model served as raw tensors; no action guard sees them."""
        request = _told(lambda: tensor_request_of(self.model, inputs, parameters))
        return self._ask(request, timeout_s).outputs

    def contract(self, *, timeout_s: float | None = None) -> ModelContract:
        """Return what the model takes and gives; raises ServingError."""
        message = contracts_pb.ContractRequest(model_name=self.model)
        raw = self._call(CONTRACT, message.SerializeToString(), timeout_s)
        text = contracts_pb.ContractResponse.FromString(raw).contract_json
        return _told(lambda: contract_of(text))

    def ready(self, *, timeout_s: float = 2.0) -> bool:
        """Return whether the model takes requests now; False also when nobody answers."""
        message = pb.HealthRequest(model_name=self.model)
        try:
            raw = self._call(HEALTH, message.SerializeToString(), timeout_s)
        except ServingError:
            return False
        return bool(pb.HealthResponse.FromString(raw).healthy)

    def close(self) -> None:
        """Close the connection; requests under way fail."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, request: InferRequest, timeout_s: float | None) -> Answer:
        payload = _told(lambda: encoded(request))
        raw = self._call(INFER, payload, timeout_s)
        return _told(lambda: answer_of(request, raw))

    def _call(self, method: str, payload: bytes, timeout_s: float | None) -> bytes:
        timeout = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        call = self._channel.unary_unary(method)
        try:
            raw: bytes = call(payload, timeout=timeout, metadata=self._target.metadata)
        except grpc.RpcError as error:
            raise error_of(fault_from(error)) from None
        return raw


def _told(make: Callable[[], T]) -> T:
    """Return what ``make`` does, its faults as this client's exceptions."""
    try:
        return make()
    except Fault as fault:
        raise error_of(fault) from fault
