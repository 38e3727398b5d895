"""The client for programs without an event loop; threads may share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc
import numpy as np

from phyai_gateway.client.channel import fault_from
from phyai_gateway.client.errors import ServingError, error_of
from phyai_gateway.client.exchange import ClientBase, Exchange, actions_in
from phyai_gateway.client.messages import Answer, Picture
from phyai_gateway.contract import ModelContract

T = TypeVar("T")


class Client(ClientBase):
    """One model of a server or gateway at ``HOST:PORT``.

    timeout_s: of a request, 600 at most; there is no answer after it.  model: may be "" for a
    server with one model.  token, ca, cert, key, robot: see ``Target``.

    >>> Client("127.0.0.1:50063", model="pi05").close()
    """

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
        return actions_in(answer)

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
        asked = self._asking(
            images, state, prompt, horizon=horizon, options=options, extensions=extensions
        )
        return self._run(asked, timeout_s)

    def infer_tensors(
        self,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a model served as raw tensors; no action guard sees them."""
        answer = self._run(self._asking_tensors(inputs, parameters), timeout_s)
        return answer.outputs

    def contract(self, *, timeout_s: float | None = None) -> ModelContract:
        """Return what the model takes and gives; raises ServingError."""
        return self._run(self._asking_contract(), timeout_s)

    def ready(self, *, timeout_s: float = 2.0) -> bool:
        """Return whether the model takes requests now; False also when nobody answers."""
        try:
            return self._run(self._asking_health(), timeout_s)
        except ServingError:
            return False

    def close(self) -> None:
        """Close the connection; requests under way fail."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _opened(self) -> Any:
        return self._target.open(grpc)

    def _run(self, asked: Exchange[T], timeout_s: float | None) -> T:
        timeout = self._timeout(timeout_s)
        call = self._channel.unary_unary(asked.method)
        try:
            raw: bytes = call(asked.payload, timeout=timeout, metadata=self._target.metadata)
        except grpc.RpcError as error:
            raise error_of(fault_from(error)) from None
        return asked.read(raw)
