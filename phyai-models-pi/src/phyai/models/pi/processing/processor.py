"""Turns an observation into model inputs and model actions into robot commands.

Everything between a robot and the network, on the host: images, state, prompt, tokens, and the
way back. A processor is immutable and keeps nothing of a request, so threads can share it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import RequestError, did_you_mean
from phyai.models.pi.config import PiConfig
from phyai.models.pi.processing.images import check_image, missing_image, model_image
from phyai.models.pi.processing.normalize import to_absolute, to_relative
from phyai.models.pi.processing.processor_setup import (
    ProcessorSettings,
    TokenizerSource,
    camera_slots,
    load_settings,
)
from phyai.models.pi.processing.prompts import pad_state, prompt_parts
from phyai.models.pi.processing.tokenizer import Overlong, PromptTokenizer
from phyai.request_values import host_tensor
from phyai.types import Observation

Array = NDArray[Any]
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True, eq=False)
class PiRow:
    """Model inputs of one robot at one tick; CPU tensors without a rows dim.

    images: float32 [C, 3, S, S] in [-1, 1], C cameras in checkpoint order; -1 when missing.
    image_mask: bool [C], False for cameras that were not sent.
    tokens: int64 [max_length], right-padded with 0.  length: how many are real.
    state: float32 [max_state_dim], normalised and zero-padded.
    normalized_state: [D], before padding.  raw_state: [D], robot units; both None without state.
    """

    images: Tensor
    image_mask: Tensor
    tokens: Tensor
    length: int
    state: Tensor
    normalized_state: Array | None
    raw_state: Array | None
    prompt_text: str


class Processor:
    """Host-side processing of one checkpoint; see ``from_checkpoint``.

    Example:
        processor = Processor.from_checkpoint(folder, PiConfig.from_folder(folder, "pi05"))
        row = processor.row(Observation(images={"base_0_rgb": frame}, state=q, prompt="fold it"))
        commands = processor.actions(model_actions, row)  # float32 [H, action_dim]
    """

    def __init__(
        self, config: PiConfig, settings: ProcessorSettings, tokenizer: TokenizerSource
    ) -> None:
        self.config = config
        self.settings = settings
        self.tokenizer_source = tokenizer
        self._tokenizer: PromptTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._slots = camera_slots(config, settings)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | None,
        config: PiConfig,
        *,
        tokenizer: str | Path | None = None,
        processor_dir: str | Path | None = None,
        norm_stats: str | Path | None = None,
        robot: str | None = None,
        openpi_config: str | None = None,
        asset_id: str | None = None,
        interpolation: str | None = None,
        legacy_padding: bool = False,
        state_prompt_dim: int | None = None,
        state_in_prompt: bool | None = None,
        default_prompt: str | None = None,
        overlong: Overlong = "error",
    ) -> Processor:
        """Return the processor of a checkpoint folder (None: no files, identity statistics).

        tokenizer: tokenizer.json, tokenizer.model or a folder; else the checkpoint's, else the hub.
        processor_dir: folder of the policy_*processor.json files, when not the checkpoint.
        norm_stats: statistics file that replaces the checkpoint's.
        robot, openpi_config, asset_id: see ``robots``, ``openpi_configs``, ``norm_stats``.
        interpolation: "lerobot" or "openpi"; default by family.
        state_prompt_dim: 32 for checkpoints trained on a state padded in the prompt.
        overlong: "error", or "truncate" to cut a long prompt as the official code does.
        Raises: CheckpointError, ConfigError; ``warnings`` holds what is odd but not an error.
        """
        place = None if folder is None else Path(folder)
        settings, source = load_settings(
            place,
            config,
            tokenizer=tokenizer,
            processor_dir=None if processor_dir is None else Path(processor_dir),
            norm_stats=norm_stats,
            robot=robot,
            openpi_config=openpi_config,
            asset_id=asset_id,
            interpolation=interpolation,
            legacy_padding=legacy_padding,
            state_prompt_dim=state_prompt_dim,
            state_in_prompt=state_in_prompt,
            default_prompt=default_prompt,
            overlong=overlong,
        )
        return cls(config, settings, source)

    # ------------------------------------------------------------ facts

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about this checkpoint, such as missing statistics."""
        return self.settings.warnings

    @property
    def max_length(self) -> int:
        """Tokens in a row's ``tokens``: the processor file's length, else the config's."""
        return self.settings.max_length

    @property
    def state_dim(self) -> int | None:
        """Values a state must have; None when any length up to max_state_dim will do."""
        return self.settings.state_dim

    @property
    def needs_state(self) -> bool:
        settings = self.settings
        return (
            self.config.model == "pi0"
            or settings.state_in_prompt
            or settings.relative_mask is not None
        )

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Cameras an observation may hold, as the robot or the checkpoint calls them."""
        return self._expected()

    @property
    def action_dim(self) -> int:
        return self.settings.action_dim

    @property
    def action_names(self) -> tuple[str, ...]:
        return self.settings.action_names

    @property
    def units(self) -> tuple[str, ...]:
        robot = self.settings.robot
        return () if robot is None else robot.units

    @property
    def control_hz(self) -> float | None:
        robot = self.settings.robot
        return None if robot is None else robot.control_hz

    @property
    def tokenizer(self) -> PromptTokenizer:
        """The prompt tokenizer, loaded at first use.

        Raises: CheckpointError, MissingDependency.
        """
        loaded = self._tokenizer
        if loaded is None:
            with self._tokenizer_lock:
                loaded = self._tokenizer
                if loaded is None:
                    loaded = self.tokenizer_source.load()
                    self._tokenizer = loaded
        return loaded

    # ------------------------------------------------------------ robot -> model

    def row(self, obs: Observation) -> PiRow:
        """Return the model inputs of one observation.

        Raises: RequestError naming what is wrong with an image, the state or the prompt.
        """
        images, mask = self._images(obs.images)
        raw_state = self._state(obs.state)
        normalized, padded = self._normalized(raw_state)
        prompt = self._prompt(obs.prompt)
        parts = prompt_parts(
            prompt,
            family=self.config.family,
            model=self.config.model,
            state_in_prompt=self.settings.state_in_prompt,
            state=normalized,
            state_prompt_dim=self.settings.state_prompt_dim,
        )
        tokens, length = self.tokenizer.encode(
            parts, self.max_length, overlong=self.settings.overlong
        )
        vocab = self.config.text.vocab_size
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
            raise RequestError(
                f"prompt tokens must be in [0, {vocab}); got up to {int(tokens.max())} from "
                f"{self.tokenizer.source}. Pass the tokenizer of this checkpoint."
            )
        return PiRow(
            images=images,
            image_mask=mask,
            tokens=torch.from_numpy(tokens),
            length=length,
            state=padded,
            normalized_state=normalized,
            raw_state=raw_state,
            prompt_text="".join(parts),
        )

    def _images(self, images: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if not isinstance(images, Mapping):
            raise RequestError(
                f"images must be a mapping of camera name to image; got {type(images).__name__}. "
                f"Send {', '.join(self._expected())}."
            )
        robot = self.settings.robot
        sent: dict[str, tuple[str, Any]] = {}
        for name, image in images.items():
            if robot is not None and name in robot.ignored_cameras:
                continue
            camera = self._slots.get(name)
            if camera is None:
                raise RequestError(
                    f"camera must be one of {', '.join(self._expected())}; got {name!r}."
                    f"{did_you_mean(str(name), self._expected())} Rename it."
                )
            if camera in sent:
                raise RequestError(
                    f"camera {camera!r} must be sent once; got {sent[camera][0]!r} and {name!r}. "
                    "Drop one."
                )
            sent[camera] = (name, image)
        if not sent:
            raise RequestError(
                "at least one camera must be sent; got none. "
                f"Send any of {', '.join(self._expected())}."
            )
        size = self.config.image_resolution
        allow_chw = robot is not None and robot.uint8_chw
        rows = []
        for camera in self.config.cameras:
            if camera not in sent:
                rows.append(missing_image(size))
                continue
            name, image = sent[camera]
            rows.append(
                model_image(
                    check_image(image, name, allow_uint8_chw=allow_chw),
                    size,
                    self.settings.interpolation,
                    legacy_padding=self.settings.legacy_padding,
                )
            )
        mask = torch.tensor([camera in sent for camera in self.config.cameras])
        return torch.stack(rows), mask

    def _expected(self) -> tuple[str, ...]:
        robot = self.settings.robot
        if robot is not None:
            return tuple(robot.cameras)
        real = len(self.config.cameras) - self.config.empty_cameras
        return self.config.camera_names[:real]

    def _state(self, state: Any) -> Array | None:
        if state is None:
            if self.needs_state:
                raise RequestError(
                    f"state must be sent to this {self.config.model} checkpoint; got none. "
                    "Send the robot's state vector."
                )
            return None
        if isinstance(state, Tensor):
            state = host_tensor("state", state)
            state = state.double() if state.is_floating_point() else state
        try:
            array = np.asarray(state)
            if array.dtype.kind not in "fiu":
                raise ValueError(f"dtype {array.dtype}")
            with np.errstate(over="ignore"):  # an overflow is infinite, which is refused below
                array = array.astype(np.float32 if self.config.family == "lerobot" else np.float64)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"state must be a vector of numbers; got {error}. Send floats."
            ) from error
        if array.ndim == 2 and array.shape[0] == 1:
            # Clients with n_obs_steps send a leading time axis.
            array = array[-1]
        expected, limit = self.state_dim, self.config.max_state_dim
        if array.ndim != 1 or array.size == 0 or array.size > limit:
            raise RequestError(
                f"state must be a vector of {expected or f'1 to {limit}'} values; got shape "
                f"{list(array.shape)}. Correct it."
            )
        if expected is not None and array.size != expected:
            raise RequestError(
                f"state must have {expected} values; got {array.size}. "
                "Send the state the checkpoint was trained on."
            )
        if not np.isfinite(array).all():
            raise RequestError(
                f"state must be finite; got {array.tolist()}. Check the robot's sensors."
            )
        return array

    def _normalized(self, raw: Array | None) -> tuple[Array | None, Tensor]:
        width = self.config.max_state_dim
        if raw is None:
            return None, torch.zeros(width, dtype=torch.float32)
        robot = self.settings.robot
        state = raw if robot is None else robot.encode_state(raw)
        normalized = self.settings.normalizer.normalize_state(state)
        padded = pad_state(normalized.astype(np.float32), width)
        return normalized, torch.from_numpy(np.ascontiguousarray(padded))

    def _prompt(self, prompt: Any) -> str:
        if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
            prompt = prompt.item()
        if prompt is not None and not isinstance(prompt, str):
            raise RequestError(
                f"prompt must be a string; got {type(prompt).__name__}. Send the task as text."
            )
        if prompt is not None and not prompt.isascii() and _LONE_SURROGATE.search(prompt):
            raise RequestError(
                "prompt must be valid Unicode text; got a lone surrogate. Decode it with the "
                "right encoding."
            )
        if prompt is None or not prompt.strip():
            if self.settings.default_prompt is None:
                raise RequestError(
                    f"prompt must not be empty; got {prompt!r}. Send the task as text, or "
                    "configure a default prompt."
                )
            return self.settings.default_prompt
        return prompt

    # ------------------------------------------------------------ model -> robot

    def actions(self, model_actions: Any, row: PiRow) -> NDArray[np.float32]:
        """Return the robot's commands of one row.

        Shapes: model_actions [H, >= action_dim] float32, model space -> [H, action_dim] float32.
        LeRobot slices, un-normalises, then adds the raw state of relative dims; openpi
        un-normalises in the model's full width, adds the state, then slices.
        """
        actions = _host_array(model_actions)
        settings, mask = self.settings, self.settings.relative_mask
        if self.config.family == "lerobot":
            actions = settings.normalizer.unnormalize_actions(actions[..., : self.action_dim])
        else:
            actions = settings.normalizer.unnormalize_actions(actions)
        if mask is not None:
            actions = to_absolute(actions, self._anchor(row), mask)
        if settings.robot is not None:
            actions = settings.robot.from_model(actions)
        # A copy even where nothing is converted: the caller may clamp it in place.
        return np.array(actions[..., : self.action_dim], dtype=np.float32, order="C")

    def model_space(self, actions: Any, row: PiRow) -> NDArray[np.float32]:
        """Return robot commands in model space, relative to the row's state; inverse of actions.

        Shapes: actions [H, action_dim] robot units -> [H, max_action_dim] float32, zero-padded.
        RTC uses it to express a left-over chunk against the current state.
        """
        out = _host_array(actions)
        settings = self.settings
        if settings.robot is not None:
            out = settings.robot.encode_actions(out)
        if self.config.family == "openpi":
            out = np.asarray(out, dtype=np.float64)
        if settings.relative_mask is not None:
            out = to_relative(out, self._anchor(row), settings.relative_mask)
        out = settings.normalizer.normalize_actions(out)
        padded = np.zeros((*out.shape[:-1], self.config.max_action_dim), dtype=np.float32)
        padded[..., : out.shape[-1]] = out
        return padded

    def _anchor(self, row: PiRow) -> Array:
        if row.raw_state is None:
            raise RequestError(
                "relative actions need the state of their request; got none. Send the state."
            )
        if self.config.family == "lerobot":
            return row.raw_state
        # openpi adds the state that went through the model's inputs and back.
        return self.settings.normalizer.unnormalize_state(row.state.numpy())


def _host_array(actions: Any) -> Array:
    if isinstance(actions, Tensor):
        actions = actions.detach().cpu().float().numpy()
    return np.asarray(actions)
