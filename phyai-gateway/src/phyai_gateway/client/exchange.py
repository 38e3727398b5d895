"""What both clients share: a question as method and bytes, and how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import DecodeError

from phyai_gateway.client.channel import (
    CONTRACT,
    DEFAULT_TIMEOUT_S,
    HEALTH,
    INFER,
    Target,
    check_timeout,
)
from phyai_gateway.client.errors import error_of
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


@dataclass(frozen=True, slots=True)
class Exchange(Generic[T]):
    """One call. read: gives the result of the answer's bytes; raises ServingError."""

    method: str
    payload: bytes
    read: Callable[[bytes], T]


class ClientBase:
    """Arguments of ``Client``, and the exchanges that its methods make."""

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
        self._channel: Any = self._opened()

    def _opened(self) -> Any:
        """Return the channel to begin with; None = made when it is first used."""
        return None

    def _timeout(self, given: float | None) -> float:
        return self.timeout_s if given is None else check_timeout(given)

    def _asking(
        self,
        images: Mapping[str, Picture],
        state: Any,
        prompt: str | Sequence[str] | None,
        *,
        horizon: int,
        options: Mapping[str, Any] | None,
        extensions: Mapping[str, Any] | None,
    ) -> Exchange[Answer]:
        return _inference(
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

    def _asking_tensors(
        self, inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None
    ) -> Exchange[Answer]:
        return _inference(lambda: tensor_request_of(self.model, inputs, parameters))

    def _asking_contract(self) -> Exchange[ModelContract]:
        payload = contracts_pb.ContractRequest(model_name=self.model).SerializeToString()

        def read(raw: bytes) -> ModelContract:
            return contract_of(parsed(contracts_pb.ContractResponse, raw).contract_json)

        return Exchange(CONTRACT, payload, lambda raw: told(lambda: read(raw)))

    def _asking_health(self) -> Exchange[bool]:
        payload = pb.HealthRequest(model_name=self.model).SerializeToString()

        def read(raw: bytes) -> bool:
            return bool(parsed(pb.HealthResponse, raw).healthy)

        return Exchange(HEALTH, payload, lambda raw: told(lambda: read(raw)))


def actions_in(answer: Answer) -> np.ndarray[Any, Any]:
    """Return the actions; raises ServingError when there are none."""
    return told(lambda: actions_of(answer))


def told(make: Callable[[], T]) -> T:
    """Return what ``make`` does, its faults as this client's exceptions."""
    try:
        return make()
    except Fault as fault:
        raise error_of(fault) from fault


def parsed(kind: Any, raw: bytes) -> Any:
    """Return a server's message. Raises: Fault ``data_loss``."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise Fault("data_loss", "server must answer with a known message; it did not.") from None


def _inference(make: Callable[[], InferRequest]) -> Exchange[Answer]:
    request = told(make)
    payload = told(lambda: encoded(request))
    return Exchange(INFER, payload, lambda raw: told(lambda: answer_of(request, raw)))
