"""Requests as Observations, chunks as replies: the path of robots, action guards included."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from phyai.errors import ConfigError
from phyai.manifest import AdapterManifest
from phyai.session_options import declares_sessions
from phyai.types import ActionChunk, Observation
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, InferReply, InferRequest, TensorData
from phyai_gateway.server.config import ObservationOptions
from phyai_gateway.server.observations import ObservationBuilder, Rows

log = logging.getLogger("phyai.server")

WARM_UP_SIDE = 64  # pixels of a made-up picture
_OWN_FIELDS = ("cameras", "optional_cameras", "state_dim", "prompt", "tokenizer", "control_hz")
"""Of ``Adapter.expects()``: fields of the contract, and what is a path on this machine."""


class Policy:
    """One model that turns observations into action chunks.

    expects: what ``Adapter.expects()`` says; empty = any camera, any state.
    """

    def __init__(
        self,
        name: str,
        options: ObservationOptions,
        *,
        manifest: AdapterManifest | None,
        expects: Mapping[str, Any],
        max_rows: int,
        max_image_pixels: int,
    ) -> None:
        self._options, self._max_pixels = options, max_image_pixels
        self._names = _camera_names(options, expects)
        self.contract = _contract(name, options, manifest, expects, max_rows, self._names)
        self._builder = self._new_builder()

    # ------------------------------------------------------------ requests

    def build(self, request: InferRequest) -> Rows:
        """Return the rows of a request; raises Fault(invalid_argument)."""
        return self._builder.build(request)

    @staticmethod
    def engine_request(rows: Rows) -> Any:
        """Return what the engine is given."""
        return list(rows.observations) if rows.batched else rows.observations[0]

    def reply(self, request: InferRequest, rows: Rows, result: Any, engine_s: float) -> InferReply:
        """Return the reply to a request.

        Raises: Fault(unimplemented) for a model whose result is no actions; invalid_argument for
        more rows of actions than there are.
        """
        chunks = _chunks(result, rows)
        horizon = chunks[0].horizon
        if request.horizon > horizon:
            raise Fault(
                "invalid_argument",
                f"requested_action_horizon must be in [0, {horizon}]; got {request.horizon}.",
                started=True,
            )
        kept = request.horizon or horizon
        actions = [chunk.actions[:kept, : self._width(chunk)] for chunk in chunks]
        outputs = {}
        if request.extensions.get("return_model_actions") is True:  # what option rtc asks for next
            model_actions = [chunk.model_actions for chunk in chunks]
            outputs["model_actions"] = _floats(model_actions, rows.batched)
        return InferReply(
            request_id=request.request_id,
            actions=_floats(actions, rows.batched),
            outputs=outputs,
            inference_time_us=_engine_us(chunks, engine_s),
            extensions=_extensions(chunks, kept, rows.batched),
        )

    def _width(self, chunk: ActionChunk) -> int:
        width = int(chunk.actions.shape[1])
        return min(self._options.action_dim or width, width)

    # ------------------------------------------------------------ warm-up

    def sample(self) -> Observation:
        """Return a made-up observation of the right form: grey pictures, a state of zeros."""
        steps, side = self.contract.frames, WARM_UP_SIDE
        shape = (side, side, 3) if steps == 1 else (steps, side, side, 3)
        picture = np.full(shape, 128, np.uint8)
        dim = self.contract.state_dim
        return Observation(
            images={self._names.get(name, name): picture for name in self.contract.cameras},
            state=np.zeros(dim, np.float32) if dim else None,
            prompt=self.contract.default_prompt or "warm up",
            options={"session_id": WARM_UP_SESSION, "seq": 0} if self.contract.stateful else {},
        )

    def learn(self, chunk: object) -> None:
        """Take horizon, names and rate of the actions from a first chunk."""
        if not isinstance(chunk, ActionChunk):
            log.warning("model %r gives no actions; requests to it fail", self.contract.name)
            return
        width = self._width(chunk)
        self.contract = replace(
            self.contract,
            horizon=chunk.horizon,
            action_dim=width,
            action_names=tuple(chunk.names[:width]),
            control_hz=chunk.control_hz or self.contract.control_hz,
        )
        self._builder = self._new_builder()

    def _new_builder(self) -> ObservationBuilder:
        return ObservationBuilder(self.contract, self._names, self._max_pixels)


WARM_UP_SESSION = "phyai-warm-up"


def _camera_names(options: ObservationOptions, expects: Mapping[str, Any]) -> dict[str, str]:
    """Return clients' camera name -> the checkpoint's; raises ConfigError for too many."""
    known = [str(name) for name in expects.get("cameras") or ()]
    given = options.image_names
    if not given or not known:
        return {}
    if len(given) > len(known):
        raise ConfigError(
            f"adapter.args.image_names must hold at most {len(known)} names, the cameras of the "
            f"checkpoint ({', '.join(known)}); got {len(given)}."
        )
    return dict(zip(given, known, strict=False))


def _contract(
    name: str,
    options: ObservationOptions,
    manifest: AdapterManifest | None,
    expects: Mapping[str, Any],
    max_rows: int,
    names: Mapping[str, str],
) -> ModelContract:
    capabilities = manifest.capabilities if manifest is not None else {}
    cameras = options.image_names or tuple(str(camera) for camera in expects.get("cameras") or ())
    stateful = bool(declares_sessions(capabilities))
    optional = cameras if expects.get("optional_cameras") and not names else ()
    control_hz = expects.get("control_hz") or capabilities.get("control_hz")
    return ModelContract(
        name=name,
        plugin=manifest.id if manifest is not None else "",
        cameras=dict.fromkeys(cameras),
        optional_cameras=optional,
        state_dim=options.state_dim or int(expects.get("state_dim") or 0),
        action_dim=options.action_dim,
        control_hz=float(control_hz) if isinstance(control_hz, int | float) else None,
        default_prompt=options.default_prompt,
        needs_prompt=bool(expects.get("prompt", False)) and options.default_prompt is None,
        options=tuple(
            str(option)
            for kind in ("options", "own_options")
            for option in capabilities.get(kind) or ()
        ),
        max_rows=max_rows,
        stateful=stateful,
        idempotent=not stateful,
        extra=_json_only({k: v for k, v in expects.items() if k not in _OWN_FIELDS}),
    )


def _json_only(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that JSON can hold; the others only mean something to Python."""
    kept = {}
    for key, value in values.items():
        try:
            kept[key] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            continue
    return kept


def _chunks(result: Any, rows: Rows) -> list[ActionChunk]:
    found = list(result) if rows.batched else [result]
    if not found or not all(isinstance(chunk, ActionChunk) for chunk in found):
        raise Fault(
            "unimplemented",
            "model must answer with actions to be served to robots; it gives something else.",
            started=True,
        )
    if len({chunk.actions.shape for chunk in found}) > 1:
        raise Fault(
            "unimplemented",
            "rows of a batch must have equally many actions; they have not. Send them one by one.",
            started=True,
        )
    return found


def _floats(rows: Sequence[Any], batched: bool) -> TensorData:
    stacked = np.stack(rows) if batched else np.asarray(rows[0])
    array = np.ascontiguousarray(stacked, dtype="<f4")
    return TensorData(array.tobytes(), tuple(array.shape), "float32")


def _engine_us(chunks: Sequence[ActionChunk], engine_s: float) -> int:
    """Return the time in the engine without its queue, microseconds."""
    timing = chunks[0].timing
    if "total" not in timing:
        return round(1e6 * engine_s)
    return max(round(1e3 * (timing["total"] - timing.get("queue", 0.0))), 0)


def _extensions(chunks: Sequence[ActionChunk], kept: int, batched: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if chunks[0].control_hz is not None:
        found["control_hz"] = chunks[0].control_hz
    masks = [chunk.mask[:kept].tolist() for chunk in chunks]
    if not all(all(mask) for mask in masks):  # rows that must not be executed
        found["mask"] = masks if batched else masks[0]
    return found
