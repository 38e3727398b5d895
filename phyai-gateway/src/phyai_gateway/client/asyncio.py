"""The client for programs with an event loop; as ``Client``, with ``await``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import grpc
import numpy as np

from phyai_gateway.client.channel import fault_from
from phyai_gateway.client.errors import ServingError, error_of
from phyai_gateway.client.exchange import ClientBase, Exchange, actions_in
from phyai_gateway.client.messages import Answer, Picture
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault

T = TypeVar("T")


class AsyncClient(ClientBase):
    """One model of a server or gateway; arguments as of ``Client``. Cancelling gives up the work.

    >>> client = AsyncClient("127.0.0.1:50063", model="pi05")
    """

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
        return actions_in(answer)

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
        asked = self._asking(
            images, state, prompt, horizon=horizon, options=options, extensions=extensions
        )
        return await self._run(asked, timeout_s)

    async def infer_tensors(
        self,
        inputs: Mapping[str, Any],
        parameters: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the outputs of a model served as raw tensors; no action guard sees them."""
        answer = await self._run(self._asking_tensors(inputs, parameters), timeout_s)
        return answer.outputs

    async def contract(self, *, timeout_s: float | None = None) -> ModelContract:
        """Return what the model takes and gives; raises ServingError."""
        return await self._run(self._asking_contract(), timeout_s)

    async def ready(self, *, timeout_s: float = 2.0) -> bool:
        """Return whether the model takes requests now; False also when nobody answers."""
        try:
            return await self._run(self._asking_health(), timeout_s)
        except ServingError:
            return False

    async def close(self) -> None:
        """Close the connection; requests under way fail."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _run(self, asked: Exchange[T], timeout_s: float | None) -> T:
        timeout = self._timeout(timeout_s)
        if self._channel is None:  # belongs to the running loop
            self._channel = self._target.open(grpc.aio)
        channel = self._channel
        call = channel.unary_unary(asked.method)(
            asked.payload, timeout=timeout, metadata=self._target.metadata
        )
        try:
            raw: bytes = await call
        except grpc.aio.AioRpcError as error:
            raise error_of(fault_from(error)) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if channel is self._channel or (task is not None and task.cancelling()):
                raise
            # Not this task but the call was cancelled, by close().
            raise error_of(Fault("cancelled", "client was closed.", started=True)) from None
        return asked.read(raw)
