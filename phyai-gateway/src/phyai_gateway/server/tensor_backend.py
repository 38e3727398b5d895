"""A model's own request from named tensors. No safety hooks: results are in model space.

Robots belong behind ``server.policy``: validators and clamps see observations and chunks only.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from phyai.errors import ConfigError
from phyai.manifest import AdapterManifest
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferReply, InferRequest, TensorData
from phyai_gateway.server.config import TensorOptions

LABEL = "no safety hooks"


class TensorBackend:
    """Builds ``request_type(**inputs, **extensions_json.parameters)`` and returns its tensors.

    to_tensor, to_data: between wire tensors and the engine's.
    """

    def __init__(
        self,
        name: str,
        options: TensorOptions,
        *,
        manifest: AdapterManifest | None,
        max_rows: int,
        to_tensor: Callable[[TensorData], Any],
        to_data: Callable[[Any], TensorData | None],
    ) -> None:
        self._options, self._to_tensor, self._to_data = options, to_tensor, to_data
        self._type = request_type(options.request_type)
        fields = dataclasses.fields(self._type) if dataclasses.is_dataclass(self._type) else ()
        self.contract = ModelContract(
            name=name,
            plugin=manifest.id if manifest is not None else "",
            needs_prompt=False,
            max_rows=max_rows,
            extra={"kind": "tensors", "guards": LABEL, "inputs": [field.name for field in fields]},
        )

    def build(self, request: InferRequest) -> Any:
        """Return the model's request; raises Fault(invalid_argument) naming what is wrong."""
        if request.images or request.state is not None:
            raise _bad(
                "images and robot_state must be left out: this model takes named tensors; got "
                "some. Send them as inputs."
            )
        parameters = request.extensions.get("parameters", {})
        if not isinstance(parameters, Mapping):
            raise _bad("extensions_json.parameters must be an object of names to values.")
        twice = sorted(set(parameters) & set(request.inputs))
        if twice:
            raise _bad(f"inputs and parameters must not share names; got {', '.join(twice)} twice.")
        values = {name: self._to_tensor(tensor) for name, tensor in request.inputs.items()}
        values.update(parameters)
        if not values:
            raise _bad("inputs must be given; got none. Send the model's tensors by name.")
        if self._type is None:
            return values
        try:
            return self._type(**values)
        except (TypeError, ValueError):
            known = self.contract.extra["inputs"]
            raise _bad(
                f"inputs must fit the model's request ({', '.join(known) or 'see its class'}); "
                f"got {', '.join(sorted(values))}."
            ) from None

    @staticmethod
    def engine_request(built: Any) -> Any:
        return built

    def reply(self, request: InferRequest, built: Any, result: Any, engine_s: float) -> InferReply:
        """Return the tensors of a result, a single one under ``output_name``."""
        named = result if isinstance(result, Mapping) else {self._options.output_name: result}
        outputs = {}
        for name, value in named.items():
            data = self._to_data(value)
            if data is None:
                raise Fault(
                    "unimplemented",
                    f"output {str(name)!r} must be a tensor of a known dtype; it is not.",
                    started=True,
                )
            outputs[str(name)] = data
        return InferReply(
            request.request_id, outputs=outputs, inference_time_us=round(1e6 * engine_s)
        )


def request_type(path: str | None) -> Any:
    """Return the class the server's own file names; raises ConfigError."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"adapter.args.request_type must name a class that can be imported; got {path!r}: "
            f"{error}."
        ) from error


def _bad(message: str) -> Fault:
    return Fault("invalid_argument", message)
