"""``name=value`` words of our side become arguments of the plugin and settings of the engine."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.peers.base import Refused, Setup


def split_options(options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the plugin's arguments and the engine's settings of ``name=value`` words.

    ``config.*`` and ``kernel_policy`` are the engine's, other names the plugin's. A value is JSON
    where it reads as JSON, else text. Raises: Refused for a word without ``=``.
    """
    plugin: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for word in options.split():
        name, equals, text = word.partition("=")
        if not equals:
            raise Refused(f"options of our side must be name=value; got {word!r}.")
        parts = name.split(".")
        table = engine if parts[0] in ("config", "kernel_policy") else plugin
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = _value(word, text)
    return plugin, engine


def _value(word: str, text: str) -> Any:
    def refuse(constant: str) -> Any:  # the Python reader takes what no JSON has
        raise Refused(f"options of our side must be finite; got {word!r}.")

    try:
        return json.loads(text, parse_constant=refuse)
    except ValueError:
        return text


def engine_settings(options: dict[str, Any], setup: Setup) -> dict[str, Any]:
    """Return the engine's settings with the threads and the parameters' dtype of the setup."""
    config = {**options, "config": dict(options.get("config", {}))}
    dtype = "float32" if setup.dtype == "fp32" else "bfloat16"
    config["config"].setdefault("device", {"target": "cpu", "params_dtype": dtype})
    runtime = dict(config["config"].get("runtime", {}))
    config["config"]["runtime"] = {"num_threads": setup.threads, **runtime}
    return config
