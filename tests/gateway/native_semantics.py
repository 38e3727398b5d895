"""What a model server checks of a native request, for a router without a model."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import InferRequest
from phyai_gateway.proto.encoded import decoded
from phyai_gateway.server.observations import ObservationBuilder

MAX_PIXELS = 4096 * 4096


def check_native(contract: ModelContract) -> Callable[[InferRequest], Coroutine[Any, Any, None]]:
    """Return a check as the model server makes it; a tensor model's inputs are only read."""
    builder = ObservationBuilder(contract, {}, MAX_PIXELS)

    async def check(request: InferRequest) -> None:
        whole = decoded(request)
        if not contract.extra.get("kind"):
            builder.build(whole)

    return check
