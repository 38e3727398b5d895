"""The JSON that travels beside a request: read with limits, written compactly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

from phyai_gateway.messages import Fault

MAX_JSON_BYTES = 1024 * 1024  # room for a left-over chunk written as numbers
MAX_DEPTH = 32


def read(text: str) -> dict[str, Any]:
    """Return the object in ``text``; "" is an empty one.

    Raises: Fault(invalid_argument) when it is no JSON object, too large or nested too deeply, or
    holds NaN or infinity.

    >>> read('{"options": {"seed": 7}}')
    {'options': {'seed': 7}}
    """
    if not text:
        return {}
    if len(text) > MAX_JSON_BYTES:
        raise _bad(f"at most {MAX_JSON_BYTES} characters", str(len(text)))
    try:
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        what = "text nested too deeply" if isinstance(error, RecursionError) else "other text"
        raise _bad("a JSON object", what) from error
    if not isinstance(found, dict):
        raise _bad("a JSON object", type(found).__name__)
    _check_depth(found)
    if "\\u" in text:
        _check_texts(found)
    return found


def write(values: Mapping[str, Any]) -> str:
    """Return ``values`` as JSON, "" when empty.

    Raises: Fault(invalid_argument) for a value JSON cannot express.
    """
    if not values:
        return ""
    try:
        return json.dumps(dict(values), separators=(",", ":"), allow_nan=False, default=_listed)
    except (TypeError, ValueError) as error:
        raise _bad("values that JSON can express", str(error)) from error


def _listed(value: object) -> Any:
    """Write arrays and numpy's numbers as plain ones, without importing numpy."""
    convert = getattr(value, "tolist", None)
    if convert is None:
        raise TypeError(f"a {type(value).__name__}")
    return convert()


def _check_depth(root: object) -> None:
    level, depth = [root], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _bad(f"nested at most {MAX_DEPTH} deep", "more")
        children: list[object] = []
        for value in level:
            if isinstance(value, dict):
                children.extend(value.values())
            elif isinstance(value, list):
                children.extend(value)
        level = [child for child in children if isinstance(child, dict | list)]


def _check_texts(found: dict[str, Any]) -> None:
    """Refuse escapes that stand for half a character: no message could carry them on."""
    try:
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("text that UTF-8 can express", "half a surrogate pair") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("number is too large")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _bad(rule: str, got: str) -> Fault:
    return Fault(
        "invalid_argument", f"extensions_json must be {rule}; got {got}. Mend or leave it out."
    )
