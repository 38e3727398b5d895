"""A light client of PhyAI's model server and gateway, for robots: numpy and gRPC, no torch.

>>> from phyai_gateway.client import Client
>>> with Client("127.0.0.1:50063", model="pi05") as client:  # doctest: +SKIP
...     actions = client.infer({"base_0_rgb": picture}, state, "pick up the cup")
"""

from __future__ import annotations

from phyai_gateway.client.asyncio import AsyncClient
from phyai_gateway.client.blocking import Client
from phyai_gateway.client.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NotAllowed,
    RequestRefused,
    ServerBusy,
    ServerFailed,
    ServerUnavailable,
    ServingError,
)
from phyai_gateway.client.messages import Answer

__all__ = [
    "Answer",
    "AsyncClient",
    "Client",
    "DeadlineExceeded",
    "InvalidRequest",
    "ModelNotFound",
    "NotAllowed",
    "RequestRefused",
    "ServerBusy",
    "ServerFailed",
    "ServerUnavailable",
    "ServingError",
]
