"""A model's contract as the JSON text that servers publish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault

MAX_CONTRACT_BYTES = 1 << 20


def contract_of(text: str) -> ModelContract:
    """Return the contract in a server's JSON; fields of other versions are left out.

    Raises: Fault(data_loss).
    """
    try:
        data = json.loads(text) if len(text) <= MAX_CONTRACT_BYTES else None
        known = {field.name for field in fields(ModelContract)}
        values: dict[str, Any] = {k: v for k, v in dict(data or {}).items() if k in known}
        for name in ("optional_cameras", "state_names", "action_names", "options"):
            if name in values:
                values[name] = tuple(str(item) for item in values[name])
        if "cameras" in values:
            values["cameras"] = _cameras(values["cameras"])
        return ModelContract(**values)
    except (TypeError, ValueError, AttributeError, RecursionError):
        raise Fault(
            "data_loss", "server's contract must be JSON of known form; it is not."
        ) from None


def _cameras(found: Mapping[str, Any]) -> dict[str, tuple[int, int, int] | None]:
    cameras: dict[str, tuple[int, int, int] | None] = {}
    for name, size in found.items():
        if size is None:
            cameras[str(name)] = None
        else:
            height, width, channels = (int(value) for value in size)
            cameras[str(name)] = (height, width, channels)
    return cameras
