"""Host side of the policy: observations and action tasks to model requests, and actions back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai import hub
from phyai.errors import RequestError, did_you_mean
from phyai.models.cosmos3.args import Cosmos3PolicyArgs
from phyai.models.cosmos3.checkpoint_files import VAE_FOLDER, text_tokenizer
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.processing.action_spaces import SPACES
from phyai.models.cosmos3.processing.actions import action_plan, fill_clip, given_actions
from phyai.models.cosmos3.processing.canvas import Canvas, canvas_of, fit
from phyai.models.cosmos3.processing.checks import float_rows
from phyai.models.cosmos3.processing.domains import domain_of
from phyai.models.cosmos3.processing.droid import observed_image
from phyai.models.cosmos3.processing.frames import Pixels, clip_of, frame_of, to_signed
from phyai.models.cosmos3.request import Cosmos3ActionRequest
from phyai.models.cosmos3.robots import RobotSettings, robot_settings
from phyai.models.cosmos3.text.action_prompts import (
    DROID_VIEWS,
    framing_text,
    json_prompt,
    plain_prompt,
)
from phyai.models.cosmos3.text.tokenizer import TextTokenizer
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.types import Observation

TASK_SAMPLING = (
    *("num_inference_steps", "guidance_scale", "guidance_interval", "flow_shift", "schedule"),
    *("sigmas", "seed", "noise", "sound_frames"),
)
"""Fields of a request that a task takes by these names; its others are made."""
OVERRIDES = (
    "chunk_size",
    "resolution",
    "prompt_format",
    "num_steps",
    "guidance_scale",
    "fps",
    "domain",
)
"""Settings of a robot that are also arguments, of the same name; and ``robot_shift``."""


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What is kept of an observation until its actions are there.

    prompt: the whole text the model got.  history: rows in front of the actions.
    state: what commands start from, where they do.
    """

    prompt: str
    history: int
    canvas: Canvas
    state: NDArray[np.float32] | None = None


class Cosmos3PolicyProcessor:
    """Turns observations of one robot, or action tasks of any, into Cosmos3ActionRequest.

    Host only, immutable, safe to share between threads. tokenizer None: only ``decode`` works.

    >>> Cosmos3PolicyProcessor.from_checkpoint("DIR").task("push the block", image=frame)
    ... # doctest: +SKIP
    """

    def __init__(
        self,
        config: Cosmos3Config,
        tokenizer: TextTokenizer | None,
        args: Cosmos3PolicyArgs,
        vae: VAEConfig | None = None,
    ) -> None:
        self.config, self.tokenizer, self.args = config, tokenizer, args
        self.vae = vae or VAEConfig()
        self.robot = _overridden(robot_settings(args.robot), args)
        self.space = SPACES[self.robot.action_space]

    @classmethod
    def from_checkpoint(cls, checkpoint_dir: str | Path, **changes: Any) -> Cosmos3PolicyProcessor:
        """Return the processor of a checkpoint's files; changes: fields of Cosmos3PolicyArgs.

        Raises: CheckpointError and its kinds, ConfigError.
        """
        args = Cosmos3PolicyArgs(checkpoint_dir=checkpoint_dir, **changes)
        folder = hub.resolve(checkpoint_dir, revision=args.revision, allow=FILES)
        config = args.config or Cosmos3Config.from_folder(folder)
        tokenizer = text_tokenizer(folder, config, args.max_text_tokens)
        return cls(config, tokenizer, args, VAEConfig.from_folder(folder / VAE_FOLDER))

    # ------------------------------------------------------------ in

    def observation(self, observation: Observation) -> tuple[Cosmos3ActionRequest, PolicyRow]:
        """Return the request of one observation and what ``decode`` needs of it.

        Raises: RequestError for anything that is absent, of another size or not finite.
        """
        robot, history = self.robot, self.args.history_length
        size = robot.image_size if self.args.resize_image else None
        image = observed_image(observation.images, size)
        height, width = image.shape[:2]
        canvas = canvas_of(height, width, robot.resolution)
        plan = action_plan(
            "policy",
            chunk=robot.chunk_size,
            raw_dim=self.space.raw_dim,
            history=history,
            temporal=self.vae.scale_factor_temporal,
        )
        prompt = self._prompt(
            observation.prompt,
            robot.prompt_format,
            frames=plan.frames,
            fps=robot.fps,
            canvas=canvas,
            framing=framing_text("concat_view", DROID_VIEWS),
        )
        clean = self.space.rows(observation.state, history)
        domain = domain_of(robot.domain, self.config.num_embodiment_domains, plan.raw_dim)
        request = Cosmos3ActionRequest(
            text_ids=self._ids(prompt),
            neg_text_ids=self._ids(""),
            video_shape=(plan.latent_frames, *canvas.latent_size(self.vae.scale_factor_spatial)),
            fps=robot.fps,
            num_inference_steps=robot.num_steps,
            guidance_scale=robot.guidance_scale,
            flow_shift=robot.flow_shift,
            schedule=self.args.schedule or "native",
            domain_id=domain.id,
            action_chunk=plan.rows,
            raw_action_dim=plan.raw_dim,
            cond_video_pixels=to_signed(fit(image[None], canvas))[None],
            cond_action=torch.from_numpy(clean)[None] if history else None,
            cond_action_indexes=plan.clean_rows,
            action_start_frame_offset=plan.start,
        )
        state = float_rows("state", observation.state, None) if self.space.relative else None
        return request, PolicyRow(prompt, history, canvas, state)

    def task(
        self,
        prompt: str,
        *,
        mode: str = "policy",
        image: Any = None,
        video: Any = None,
        raw_actions: Any = None,
        domain: str | int = "no_action",
        raw_action_dim: int | None = None,
        chunk_size: int = 16,
        fps: float = 24.0,
        resolution_tier: int | str = 480,
        view_point: str = "ego_view",
        prompt_format: str = "json",
        negative_prompt: str = "",
        **sampling: Any,
    ) -> Cosmos3ActionRequest:
        """Return the request of a generic action task, without a state row.

        mode: policy and forward_dynamics start from an image (or the first frame of a video),
            inverse_dynamics sees a whole video of chunk_size + 1 frames; a shorter one repeats its
            last frame.
        raw_actions: [T, raw dim], model units, for forward_dynamics.  sampling: fields of the
        request, such as num_inference_steps, guidance_scale, flow_shift, seed and noise.
        Raises: RequestError.
        """
        _check_sampling(sampling)
        known = domain_of(domain, self.config.num_embodiment_domains, raw_action_dim)
        assert known.raw_dim is not None  # domain_of asks for it
        temporal = self.vae.scale_factor_temporal
        plan = action_plan(mode, chunk=chunk_size, raw_dim=known.raw_dim, temporal=temporal)
        clip = _clip(image, video, 1 + temporal * max(plan.clean_frames))
        height, width = clip.shape[1:3]
        canvas = canvas_of(height, width, resolution_tier)
        text = self._prompt(
            prompt,
            prompt_format,
            frames=plan.frames,
            fps=fps,
            canvas=canvas,
            framing=framing_text(view_point),
        )
        given = None
        if plan.clean_rows:
            given = torch.from_numpy(given_actions(raw_actions, plan))[None]
        elif raw_actions is not None:
            raise RequestError(
                f"raw_actions must be left out in mode {mode}, which makes them; got "
                f"{type(raw_actions).__name__}. Use mode forward_dynamics."
            )
        return Cosmos3ActionRequest(
            **{
                "text_ids": self._ids(text),
                "neg_text_ids": self._ids(negative_prompt, "negative_prompt"),
                "video_shape": (
                    plan.latent_frames,
                    *canvas.latent_size(self.vae.scale_factor_spatial),
                ),
                "fps": fps,
                "mode": plan.mode,
                "domain_id": known.id,
                "action_chunk": plan.rows,
                "raw_action_dim": plan.raw_dim,
                "cond_video_pixels": to_signed(fit(clip, canvas))[None],
                "cond_frame_indexes": plan.clean_frames,
                "cond_action": given,
                "cond_action_indexes": plan.clean_rows,
                "action_start_frame_offset": plan.start,
                **sampling,
            }
        )

    # ------------------------------------------------------------ out

    def decode(
        self, rows: NDArray[np.float32], history: int, state: Any = None
    ) -> NDArray[np.float32]:
        """Return the robot's actions [chunk, A] of the model's action rows [L, >= raw_dim].

        state: what the observation held; needed where commands start from it.
        """
        return self.space.actions(rows, state, history)

    # ------------------------------------------------------------ internals

    def _prompt(
        self,
        instruction: Any,
        form: str,
        *,
        frames: int,
        fps: float,
        canvas: Canvas,
        framing: str,
    ) -> str:
        if instruction is None:
            raise RequestError("prompt must be sent; got none. Say what the robot should do.")
        make = json_prompt if form == "json" else plain_prompt
        return make(
            instruction,
            frames=frames,
            fps=fps,
            height=canvas.height,
            width=canvas.width,
            framing=framing,
        )

    def _ids(self, prompt: str, name: str = "prompt") -> Tensor:
        if self.tokenizer is None:
            raise RequestError(
                "prompts need the checkpoint's text_tokenizer folder; got an engine without one. "
                "Send model requests with token ids."
            )
        return torch.from_numpy(self.tokenizer.encode(prompt, name=name))[None]


def _check_sampling(sampling: Mapping[str, Any]) -> None:
    """Raise RequestError for a name that neither a task nor its request has."""
    allowed = [f.name for f in fields(Cosmos3ActionRequest)]
    unknown = next((name for name in sampling if name not in allowed), None)
    if unknown is not None:
        own = inspect.signature(Cosmos3PolicyProcessor.task).parameters
        known = [*(name for name in own if name not in ("self", "sampling")), *TASK_SAMPLING]
        raise RequestError(
            f"option of a task must be one of {', '.join(known)}; got {unknown!r}."
            f"{did_you_mean(unknown, [*known, *allowed])} Rename it."
        )


def _clip(image: Any, video: Any, frames: int) -> Pixels:
    """Return ``frames`` frames of the image or the video; a short one repeats its last frame."""
    if (image is None) == (video is None):
        raise RequestError(
            f"a task must show an image or a video; got {'neither' if image is None else 'both'}. "
            "Send one of them."
        )
    clip = frame_of("image", image)[None] if video is None else clip_of("video", video)
    if video is None and frames > 1:
        raise RequestError(
            "mode inverse_dynamics must see a video; got an image. Send video [T, h, w, 3]."
        )
    return fill_clip(clip, frames)


def _overridden(robot: RobotSettings, args: Cosmos3PolicyArgs) -> RobotSettings:
    """Return the robot's settings with those of the arguments that are set."""
    given = {name: getattr(args, name) for name in OVERRIDES}
    given["flow_shift"] = args.robot_shift
    return replace(robot, **{name: value for name, value in given.items() if value is not None})
