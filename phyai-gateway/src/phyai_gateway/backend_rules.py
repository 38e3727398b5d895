"""What may be registered as a backend."""

from __future__ import annotations

from typing import Any

from phyai_gateway.listeners import ConfigError, format_endpoint, parse_endpoint
from phyai_gateway.messages import Fault

MAX_NAME = 256


def named(model: Any, endpoint: Any) -> tuple[str, str]:
    """Return model and endpoint as they are kept; raises Fault for what cannot be one.

    >>> named("pi05", "grpc://127.0.0.1:50063")
    ('pi05', '127.0.0.1:50063')
    """
    if not isinstance(model, str) or not model.strip() or len(model) > MAX_NAME:
        raise Fault("invalid_argument", f"model_name must be a text of 1 to {MAX_NAME} characters.")
    try:
        model.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: no message, page or metric can carry it
        raise Fault("invalid_argument", "model_name must be valid Unicode; it is not.") from None
    if not isinstance(endpoint, str):
        raise Fault("invalid_argument", "endpoint must be HOST:PORT.")
    try:
        return model, format_endpoint(*parse_endpoint(endpoint))
    except ConfigError as error:
        raise Fault("invalid_argument", str(error)) from None


def check_weight(weight: Any) -> None:
    """Raise Fault unless it is a number from 0.01 to 100."""
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 0.01 <= weight <= 100:
        got = f"{weight!r:.40}" if number else type(weight).__name__  # YAML nests without end
        raise Fault("invalid_argument", f"weight must be 0.01 to 100; got {got}.")
