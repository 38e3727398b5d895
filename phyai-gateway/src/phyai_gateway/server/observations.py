"""From a request to Observations, one per row; everything is checked before the engine sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phyai.types import Observation
from phyai_gateway.contract import ModelContract
from phyai_gateway.messages import Fault, ImageData, InferRequest, TensorData
from phyai_gateway.server.images import decode_image

MAX_PROMPT_BYTES = 64 * 1024
FILES_PER_REQUEST = 2  # of the largest size; small ones may be many
PER_ROW_OPTIONS = ("seed", "session_id", "seq")
"""Options that a batch may give as a list, one value per row; others hold for every row."""

_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True, slots=True)
class Rows:
    """batched: whether the reply has a row dim, as the request had."""

    observations: tuple[Observation, ...]
    batched: bool


class ObservationBuilder:
    """Builds what one model takes. Keeps nothing of a request, so threads may share it.

    cameras: name clients use -> the checkpoint's; empty = taken as they are.
    """

    def __init__(
        self, contract: ModelContract, cameras: Mapping[str, str], max_pixels: int
    ) -> None:
        self.contract, self._cameras, self._max_pixels = contract, dict(cameras), max_pixels

    def build(self, request: InferRequest) -> Rows:
        """Return the rows of a request; raises Fault(invalid_argument) naming what is wrong."""
        if request.inputs:
            raise _bad(
                "inputs must be left out: this model takes observations; got "
                f"{', '.join(sorted(request.inputs))}. Send images, robot_state and instruction."
            )
        self._check_names([image.name for image in request.images])
        images = self._images(request.images)
        state = self._state(request.state)
        rows, batched = self._count(request, images, state)
        self._check_horizon(request.horizon)
        prompts, options = self._prompts(request, rows), _options(request.options, rows, batched)
        return Rows(
            tuple(
                Observation(
                    images={
                        self._cameras.get(name, name): pixels[row]
                        if self._has_rows(pixels)
                        else pixels
                        for name, pixels in images.items()
                    },
                    state=None if state is None else state[row] if state.ndim == 2 else state,
                    prompt=prompts[row],
                    options=options[row],
                )
                for row in range(rows)
            ),
            batched,
        )

    # ------------------------------------------------------------ parts

    def _check_names(self, names: Sequence[str]) -> None:
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not all(names):
            raise _bad(f"image names must be given and unique; got {_listed(names)}.")
        known = self.contract.cameras
        if not known:
            return
        missing = set(known) - set(names) - set(self.contract.optional_cameras)
        if missing or set(names) - set(known):
            optional = self.contract.optional_cameras
            may = f" ({', '.join(optional)} may be left out)" if optional else ""
            raise _bad(f"images must be {_listed(list(known))}{may}; got {_listed(names)}.")

    def _images(self, given: Sequence[ImageData]) -> dict[str, np.ndarray[Any, Any]]:
        """Decode pictures; files together may have twice the pixels of the largest single one."""
        found, left = {}, FILES_PER_REQUEST * self._max_pixels
        for image in given:
            raw = image.encoding == "raw"  # takes no more memory than the message
            limit = self._max_pixels if raw else min(self._max_pixels, left)
            found[image.name] = decode_image(image, limit)
            if not raw:
                height, width, _ = found[image.name].shape
                left = max(left - height * width, 0)
        return found

    def _state(self, tensor: TensorData | None) -> np.ndarray[Any, Any] | None:
        dim = self.contract.state_dim
        if tensor is None:
            if dim:
                raise _bad(f"robot_state must be given, {dim} numbers; got none.")
            return None
        if tensor.dtype not in _FLOATS:
            raise _bad(f"robot_state must be FLOAT32; got {tensor.dtype}.")
        if len(tensor.shape) not in (1, 2) or (dim and tensor.shape[-1] != dim):
            wanted = dim or "D"
            raise _bad(
                f"robot_state must have shape [{wanted}] or [B, {wanted}]; got "
                f"{list(tensor.shape)}."
            )
        values = np.frombuffer(tensor.data, _FLOATS[tensor.dtype]).reshape(tensor.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            state = values.astype(np.float32)  # a copy: adapters may keep it
        if not np.isfinite(state).all():
            raise _bad("robot_state must be finite; got NaN or infinity. Check the sensor.")
        return state

    def _count(
        self,
        request: InferRequest,
        images: Mapping[str, np.ndarray[Any, Any]],
        state: np.ndarray[Any, Any] | None,
    ) -> tuple[int, bool]:
        found = {
            f"image {name!r}": len(pixels)
            for name, pixels in images.items()
            if self._has_rows(pixels)
        }
        if state is not None and state.ndim == 2:
            found["robot_state"] = len(state)
        if request.instructions:
            found["instructions"] = len(request.instructions)
        if not found:
            return 1, False
        if len(set(found.values())) > 1:
            text = ", ".join(f"{name} {count}" for name, count in found.items())
            raise _bad(f"rows of a batch must agree; got {text}.")
        rows, most = next(iter(found.values())), self.contract.max_rows
        if not 1 <= rows <= most:
            raise _bad(f"batch must have 1 to {most} rows; got {rows}. Split it.")
        single = [
            f"image {name!r}" for name, pixels in images.items() if not self._has_rows(pixels)
        ]
        if state is not None and state.ndim == 1:
            single.append("robot_state")
        if single and rows > 1:
            raise _bad(
                f"every input of a batch of {rows} must have {rows} rows; {', '.join(single)} has "
                "one without a row dim. Send pictures of a batch RAW, [B, H, W, 3]."
            )
        return rows, True

    def _has_rows(self, pixels: np.ndarray[Any, Any]) -> bool:
        """Return whether the first dim is the batch's: a model may want frames there."""
        return pixels.ndim == 5 or (pixels.ndim == 4 and self.contract.frames == 1)

    def _check_horizon(self, horizon: int) -> None:
        most = self.contract.horizon
        if most and horizon > most:
            raise _bad(f"requested_action_horizon must be in [0, {most}]; got {horizon}.")

    def _prompts(self, request: InferRequest, rows: int) -> list[str | None]:
        if request.instructions and request.instruction:
            raise _bad("instruction and extensions_json.instructions exclude each other; got both.")
        given: list[str | None] = [*request.instructions] or [request.instruction] * rows
        prompts = [
            text if text and text.strip() else self.contract.default_prompt for text in given
        ]
        if self.contract.needs_prompt and not all(prompts):
            raise _bad("instruction must be given; got none. Say what the robot is to do.")
        longest = max((len(text.encode("utf-8", "replace")) for text in prompts if text), default=0)
        if longest > MAX_PROMPT_BYTES:
            raise _bad(f"instruction must have at most {MAX_PROMPT_BYTES} bytes; got {longest}.")
        return prompts


def _options(given: Mapping[str, Any], rows: int, batched: bool) -> list[dict[str, Any]]:
    """Return the options of every row."""
    found: list[dict[str, Any]] = [dict(given) for _ in range(rows)]
    if not batched:
        return found
    for name in PER_ROW_OPTIONS:
        values = given.get(name)
        if not isinstance(values, list):
            continue
        if len(values) != rows:
            raise _bad(f"options.{name} must have one value per row ({rows}); got {len(values)}.")
        for row, value in zip(found, values, strict=True):
            row[name] = value
    return found


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:80]) for name in names[:20]) or "none"


def _bad(message: str) -> Fault:
    return Fault("invalid_argument", message)
