"""Plugin ``cosmos3_policy``: actions from what the robot sees, forward and inverse dynamics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from phyai.adapter import observations
from phyai.cache import Cache
from phyai.errors import CheckpointError, ConfigError, RequestError
from phyai.layers import Placement
from phyai.models.cosmos3.adapter import Cosmos3Base
from phyai.models.cosmos3.args import Cosmos3PolicyArgs, configured
from phyai.models.cosmos3.batch import RAW, HostRow, Sampling
from phyai.models.cosmos3.decoding import decode_frames, decode_pixels
from phyai.models.cosmos3.options import COMMON, POLICY_OWN
from phyai.models.cosmos3.policy import Cosmos3PolicyProcessor, PolicyRow
from phyai.models.cosmos3.policy_rows import policy_rows
from phyai.models.cosmos3.processing.actions import action_plan
from phyai.models.cosmos3.processing.domains import domain_of
from phyai.models.cosmos3.request import Cosmos3ActionRequest
from phyai.models.cosmos3.request_rows import row_noise, sampling_of
from phyai.types import ActionChunk, Observation, Output, Prepared

if TYPE_CHECKING:
    from phyai.engine_config import EngineConfig
    from phyai.services import Services
    from phyai.types import Tensors

RENAMED = {"num_steps": "num_inference_steps"}
SAMPLING = ("num_steps", "guidance_scale", *POLICY_OWN)
OPTIONS = (*COMMON, *POLICY_OWN)


class Cosmos3PolicyAdapter(Cosmos3Base):
    """The policy behind the runtime; one frame is encoded, no video decoded unless asked."""

    name = "cosmos3_policy"
    args_cls = Cosmos3PolicyArgs
    graph_unit = "loop"
    sound = False

    args: Cosmos3PolicyArgs

    def __init__(self, args: Cosmos3PolicyArgs, config: EngineConfig, services: Services) -> None:
        super().__init__(args, config, services)
        self.sound = args.load_sound

    def check_parts(self, folder: Path | None) -> None:
        if not self.network_config.action_gen:
            raise CheckpointError(
                "a policy's checkpoint must have action heads; this one has none. Use plugin "
                "'cosmos3', or a checkpoint with them."
            )
        if self.sound and not self.network_config.sound_gen:
            raise ConfigError(
                "load_sound needs a checkpoint with sound heads; this one has none. Leave "
                "load_sound out."
            )
        domains, temporal = self.network_config.num_embodiment_domains, self.vae_scale[0]
        if self.args.domain is not None:
            configured(lambda domain: domain_of(domain, domains, 1), self.args.domain)
        if self.args.chunk_size is not None:
            configured(
                lambda chunk: action_plan("policy", chunk=chunk, raw_dim=1, temporal=temporal),
                self.args.chunk_size,
            )

    def load_more(self, folder: Path | None, at: Placement) -> None:
        vae = None if self.vae is None else self.vae.config
        self.processor = Cosmos3PolicyProcessor(self.network_config, self.tokenizer, self.args, vae)

    def decodes_video(self) -> bool:
        return self.args.decode_video

    def expects(self) -> Mapping[str, Any]:
        robot = self.processor.robot
        stateful = self.args.history_length or self.processor.space.relative
        return {
            "cameras": robot.cameras,
            "optional_cameras": False,
            "state_dim": len(robot.names) if stateful else 0,
            "prompt": True,
        }

    # ------------------------------------------------------------ a request

    def prepare(self, request: Any) -> Prepared:
        if isinstance(request, Cosmos3ActionRequest):
            rows, sampling = self._rows(request)
            return self.batch(rows, sampling, None)
        try:
            seen = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)
        except TypeError as error:
            raise TypeError(
                f"plugin {self.name!r} takes an Observation, a list of them or "
                f"Cosmos3ActionRequest; got {type(request).__name__}. Send one of them."
            ) from error
        made = [self._observed(row) for row in seen]
        sampling = self.common([sampling for _, sampling, _ in made])
        meta = tuple(row for _, _, row in made)
        return self.batch([row for row, _, _ in made], sampling, meta)

    def _observed(self, observation: Observation) -> tuple[HostRow, Sampling, PolicyRow]:
        request, meta = self.processor.observation(observation)
        (row,), sampling = self._rows(with_options(request, observation.options))
        return row, sampling, meta

    def _rows(self, request: Cosmos3ActionRequest) -> tuple[list[HostRow], Sampling]:
        if request.sound_frames and not self.sound:
            raise RequestError(
                f"sound_frames must be left out where load_sound is off; got "
                f"{request.sound_frames!r}. Leave it out, or set load_sound."
            )
        rows = policy_rows(request, self.network_config, self.args, self.vae_scale)
        return rows, sampling_of(request, self.args, self.scheduler)

    # ------------------------------------------------------------ results

    def output(self) -> Output:
        return PolicyOutput(self)


def with_options(request: Cosmos3ActionRequest, options: Mapping[str, Any]) -> Cosmos3ActionRequest:
    """Return the request of an observation with its options in place of the robot's values."""
    changes: dict[str, Any] = {
        "seed": options.get("seed"),
        "noise": row_noise(options.get("noise"), "action"),
    }
    for name in SAMPLING:
        if options.get(name) is not None:
            changes[RENAMED.get(name, name)] = options[name]
    return replace(request, **changes)


class PolicyOutput:
    """Action rows of the model -> commands of the robot, and the predicted video when asked."""

    def __init__(self, adapter: Cosmos3PolicyAdapter) -> None:
        self.adapter, self.processor = adapter, adapter.processor

    def decode(self, x: Tensors, cache: Cache, prepared: Prepared) -> list[ActionChunk]:
        if prepared.meta is None:
            raise RequestError("a model request has no robot units; ask for its tensors.")
        videos: Sequence[Any] = [None] * prepared.rows
        if self.adapter.args.decode_video:
            videos = list(decode_frames(self.adapter, x["video"]))
        model = x["action"].float().cpu().numpy()
        return [
            self._chunk(rows, meta, video)
            for rows, meta, video in zip(model, prepared.meta, videos, strict=True)
        ]

    def _chunk(self, model: np.ndarray, row: PolicyRow, video: Any) -> ActionChunk:
        robot = self.processor.robot
        actions = self.processor.decode(model, row.history, row.state)
        info: dict[str, Any] = {"prompt": row.prompt, "image_size": row.canvas.image_size}
        return ActionChunk(
            actions=actions,
            names=robot.names,
            mask=np.ones(len(actions), dtype=bool),
            model_actions=np.ascontiguousarray(model[row.history :]),
            control_hz=robot.fps,
            units=robot.units,
            info=info if video is None else {**info, "video": video},
        )

    def tensors(self, x: Tensors, cache: Cache, prepared: Prepared) -> dict[str, Tensor]:
        raw = dict(prepared.key.extra)[RAW]
        found = {"action": x["action"][..., :raw], "video_latents": x["video"]}
        if self.adapter.args.decode_video:
            found["pixels"] = decode_pixels(self.adapter, x["video"])
        if "sound" in x:
            found["sound_latents"] = x["sound"]
        return found
