"""What KServe says of models, and its sequences: the same over HTTP and gRPC."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferRequest
from phyai_gateway.protocols.base import Router


class Sequences:
    """Counts the requests of each sequence: Triton's convention has ids, but no numbers."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._next: OrderedDict[tuple[str, str], int] = OrderedDict()

    def numbered(self, request: InferRequest) -> InferRequest:
        """Return the request with its place in the sequence; raises Fault for an unknown one."""
        session = request.options.get("session_id")
        if session is None or "seq" in request.options:
            return request
        seq = self._next.get((request.model, str(session)))
        if seq is None:
            raise Fault(
                "failed_precondition",
                f"sequence {str(session)!r:.80} is not known here. Begin it with sequence_start.",
            )
        return replace(request, options={**request.options, "seq": seq})

    def answered(self, request: InferRequest, ends: bool) -> None:
        """Count an answered request; an ended sequence is forgotten."""
        session, seq = request.options.get("session_id"), request.options.get("seq")
        if session is None or type(seq) is not int:
            return
        key = (request.model, str(session))
        self._next[key] = seq + 1
        self._next.move_to_end(key)
        if ends:
            del self._next[key]
        while len(self._next) > self._cap:
            self._next.popitem(last=False)


def is_ready(router: Router, model: str) -> bool:
    """Return whether a request for the model would find a backend now."""
    asks = getattr(router, "ready", None)
    if asks is not None:
        return bool(asks(model))
    try:
        router.contract(model)
    except Fault:
        return False
    return True


def describe(contract: ModelContract) -> dict[str, Any]:
    """Return KServe's metadata of a model; -1 = any size."""
    inputs = [
        {"name": name, "datatype": "UINT8", "shape": [-1, *(size or (-1, -1, 3))]}
        for name, size in contract.cameras.items()
    ]
    if contract.cameras or contract.state_dim:
        inputs.append(
            {"name": "state", "datatype": "FP32", "shape": [-1, contract.state_dim or -1]}
        )
        inputs.append({"name": "prompt", "datatype": "BYTES", "shape": [-1]})
    shape = [-1, contract.horizon or -1, contract.action_dim or -1]
    return {
        "name": contract.name,
        "versions": ["1"],
        "platform": "phyai",
        "inputs": inputs,
        "outputs": [{"name": "actions", "datatype": "FP32", "shape": shape}],
    }


def all_ready(router: Router) -> bool:
    """Return whether there are models and all of them are ready."""
    models = router.models()
    return bool(models) and all(is_ready(router, model) for model in models)


def check_version(version: str) -> None:
    """Raise Fault unless it is the only version that models have, or none."""
    if version not in ("", "1"):
        raise Fault("not_found", f"version must be 1; got {version!r:.40}.")
