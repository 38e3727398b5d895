"""A small flow policy that keeps every rule of the contract; mutants change a line of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from phyai import hub
from phyai.adapter import Adapter, AdapterArgs, draw_noise, is_integer, observations
from phyai.errors import RequestError
from phyai.rtc import prefix_weights
from phyai.solver import Euler
from phyai.types import ActionChunk, BufferSpec, Key, Observation, Prepared
from phyai.weights import LoadReport, load_pretrained

HORIZON, ACTIONS, STATE, WIDTH, STEPS, CAMERA = 4, 3, 5, 16, 3, "front"
SHAPE = (HORIZON, ACTIONS)
OPTIONS = ("seed", "noise", "num_steps", "rtc")
NAMES = ("x", "y", "grip")
UNITS = ("m", "m", "0 open, 1 closed")
SCALE = np.array([0.1, 0.2, 1.0], np.float32)


@dataclass
class ToyArgs(AdapterArgs):
    checkpoint_dir: str | None = None
    max_batch_size: int = 1
    precision: str | None = None


class Network(nn.Module):
    """Velocity of the chunk from the features and the chunk itself."""

    prediction = "velocity"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.see = nn.Linear(3 + STATE, WIDTH, dtype=dtype)
        self.act = nn.Linear(WIDTH + ACTIONS, ACTIONS, dtype=dtype)

    def forward(self, x: Any, step: Any, cache: Any) -> dict[str, Tensor]:
        features = cache["features"]
        wide = features[:, None].expand(-1, HORIZON, -1)
        inside = torch.cat([wide, x["action"].to(wide.dtype)], dim=-1)
        velocity = self.act(inside).float()
        return {"action": velocity}


class Features:
    """Looks at camera and state once per request."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def encode(self, cache: Any) -> None:
        seen = torch.cat([cache.inputs["colour"], cache.inputs["state"]], dim=-1)
        features = torch.tanh(self.network.see(seen.to(self.network.see.weight.dtype)))
        cache["features"].copy_(features)


class ToyOutput:
    """Scales the chunk to robot units."""

    def decode(self, x: Any, cache: Any, prepared: Prepared) -> Sequence[ActionChunk]:
        model = x["action"].numpy()
        return [
            ActionChunk(
                actions=chunk * SCALE,
                names=NAMES,
                mask=np.ones(HORIZON, bool),
                model_actions=chunk,
                control_hz=10.0,
                units=UNITS,
            )
            for chunk in model
        ]

    def tensors(self, x: Any, cache: Any, prepared: Prepared) -> Tensor:
        action: Tensor = x["action"]
        return action


class ToyPolicy(Adapter):
    name = "toy_policy"
    args_cls = ToyArgs
    args: ToyArgs

    def load(self) -> LoadReport:
        folder = hub.resolve(self.args.checkpoint_dir)
        self.network = Network(self.services.dtype)
        return load_pretrained(self.network, folder, strict=True)

    def prepare(self, request: Any) -> Prepared:
        rows = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        tensors = {
            "colour": torch.stack([self._colour(row) for row in rows]),
            "state": torch.stack([self._state(row) for row in rows]),
            "noise.action": torch.stack([self._noise(row.options) for row in rows]),
        }
        if not all(isinstance(row.prompt, str | None) for row in rows):
            raise RequestError("prompt must be a text.")
        rtc = [row.options.get("rtc") for row in rows]
        guided = any(options is not None for options in rtc)
        if guided:
            tensors.update(self._rtc(rtc))
        key = Key(num_steps=self._steps(rows), rtc="guided" if guided else "off")
        return Prepared(tensors, len(rows), key, meta=tuple(range(len(rows))))

    def _colour(self, row: Observation) -> Tensor:
        unknown = sorted(set(row.images) - {CAMERA})
        if unknown or CAMERA not in row.images:
            raise RequestError(f"images must be one of camera {CAMERA!r}; got {sorted(row.images)}")
        image = row.images[CAMERA]
        fits = isinstance(image, np.ndarray) and image.ndim == 3 and image.dtype == np.uint8
        if not fits:
            raise RequestError(f"image {CAMERA!r} must be uint8 [height, width, 3].")
        return torch.from_numpy(image.reshape(-1, 3).mean(axis=0).astype(np.float32) / 255.0)

    def _state(self, row: Observation) -> Tensor:
        state = row.state
        if not isinstance(state, np.ndarray) or state.shape != (STATE,):
            raise RequestError(f"state must be an array of {STATE} values; got {state!r}.")
        if not np.isfinite(state).all():
            raise RequestError("state must be finite; got NaN or infinity.")
        return torch.from_numpy(state.astype(np.float32))

    def _noise(self, options: Mapping[str, Any]) -> Tensor:
        noise = options.get("noise")
        if noise is None:
            return draw_noise(SHAPE, options.get("seed"))
        if np.shape(noise) != SHAPE:
            raise RequestError(f"noise must have shape {SHAPE}; got {np.shape(noise)}.")
        return torch.as_tensor(noise, dtype=torch.float32)

    def _steps(self, rows: Sequence[Observation]) -> int:
        steps = [row.options.get("num_steps", STEPS) for row in rows]
        if (
            any(n != steps[0] for n in steps)
            or not is_integer(steps[0])
            or not 1 <= steps[0] <= 100
        ):
            raise RequestError(f"num_steps must be one integer in [1, 100]; got {steps}.")
        return int(steps[0])

    def _rtc(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        weights = torch.zeros(len(rows), HORIZON)
        prev = torch.zeros(len(rows), *SHAPE)
        for i, options in enumerate(rows):
            if options is not None:
                rest = torch.as_tensor(options.prev_chunk, dtype=torch.float32)
                prev[i, : len(rest)] = rest
                delay = options.inference_delay
                weights[i] = prefix_weights("LINEAR", delay, len(rest), HORIZON)
        return {"rtc.w": weights, "rtc.prev": prev, "rtc.max": torch.full((len(rows),), 5.0)}

    def denoiser(self) -> Network:
        return self.network

    def conditioning(self) -> Features:
        return Features(self.network)

    def cache(self) -> Any:
        dtype = self.services.dtype
        return lambda key: {"features": BufferSpec((WIDTH,), dtype)}

    def solver(self) -> Euler:
        return Euler()

    def output(self) -> ToyOutput:
        return ToyOutput()
