"""From an observation to the model's inputs, and from its actions to robot commands.

Everything here follows the checkpoint's ``processor_config.json``, ``statistics.json`` and
``embodiment_id.json``; the code's own tables only fill what these files leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.backbones.qwen3_vl import Grid, patch_rows
from phyai.errors import CheckpointError, ConfigError, RequestError
from phyai.models.gr00t.config import GrootConfig
from phyai.models.gr00t.processing.backbone import BackboneSource, find_backbone
from phyai.models.gr00t.processing.embodiments import resolve_tag
from phyai.models.gr00t.processing.images import Pixels
from phyai.models.gr00t.processing.observed import camera_frames, state_parts
from phyai.models.gr00t.processing.prompts import check_prompt, formalize
from phyai.models.gr00t.processing.robot import Robot
from phyai.models.gr00t.processing.settings import (
    CONFIG,
    ProcessorSettings,
    find_folder,
    read_settings,
)
from phyai.types import Observation


@dataclass(frozen=True, slots=True)
class GrootRow:
    """The model inputs of one observation, and what decoding its actions needs.

    input_ids: int64 [S], unpadded.  images: model images, frame by frame, camera by camera.
    pixel_values: float32 [N, patch values], the images' patches.  grids: per image, in patches.
    state: float32 [steps, max_state_dim], normalised.  raw_state: as sent, by key.
    instruction: the text the model sees.
    """

    input_ids: NDArray[np.int64]
    images: tuple[Pixels, ...]
    pixel_values: Tensor
    grids: tuple[Grid, ...]
    state: NDArray[np.float32]
    embodiment_id: int
    embodiment: str
    raw_state: Mapping[str, NDArray[np.float32]]
    instruction: str


class Processor:
    """Host-side processing of one checkpoint; see ``from_checkpoint``.

    Example:
        processor = Processor.from_checkpoint(folder, GrootConfig.from_folder(folder))
        row = processor.row(Observation(images={"image": frame}, state=q, prompt="fold it"))
        commands, names = processor.decode(model_actions, row)
    """

    def __init__(
        self,
        config: GrootConfig,
        settings: ProcessorSettings | None,
        backbone: BackboneSource,
        *,
        embodiment: str | None = None,
        max_text_tokens: int = 512,
    ) -> None:
        self.config = config
        self.settings = settings
        self.backbone = backbone
        self.max_text_tokens = max_text_tokens
        self._robots: dict[str, Robot] = {}
        self._refused: dict[str, str] = {}
        if settings is not None:
            self._check_sizes(settings)
            self._build(settings)
        self._default = self._default_tag(embodiment)

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | None,
        config: GrootConfig,
        *,
        embodiment: str | None = None,
        backbone_dir: str | Path | None = None,
        processor_dir: str | Path | None = None,
        formalize_language: bool | None = None,
        letter_box_transform: bool | None = None,
        max_text_tokens: int = 512,
    ) -> Processor:
        """Return the processor of a checkpoint folder.

        embodiment: tag of observations that name none.
        backbone_dir: folder with the backbone's tokenizer and image settings; None = in the
            checkpoint or its ``backbone`` folder, else the hub when first needed.
        processor_dir: folder of processor_config.json, when not the checkpoint or ``processor``.
        formalize_language, letter_box_transform: override the checkpoint's own.
        Without processor files only model requests can be served; ``warnings`` says so.
        Raises: CheckpointError and its kinds; ConfigError for an embodiment that cannot run.
        """
        place = None if folder is None else Path(folder)
        given = {
            "formalize_language": formalize_language,
            "letter_box_transform": letter_box_transform,
        }
        overrides = {name: value for name, value in given.items() if value is not None}
        files = find_folder(place, None if processor_dir is None else Path(processor_dir))
        settings = None if files is None else read_settings(files, overrides)
        local = find_backbone(place, None if backbone_dir is None else Path(backbone_dir))
        backbone = BackboneSource(config, local)
        if settings is not None and local is not None:
            backbone.load()  # a wrong tokenizer should fail at load, not at the first request
        return cls(
            config, settings, backbone, embodiment=embodiment, max_text_tokens=max_text_tokens
        )

    def _check_sizes(self, settings: ProcessorSettings) -> None:
        for name in ("max_state_dim", "max_action_dim"):
            got, want = settings.sizes.get(name), getattr(self.config, name)
            if got is not None and got != want:
                raise CheckpointError(
                    f"{name} of {CONFIG} must equal the model's {want}; got {got}. "
                    "Use the processor files of this checkpoint."
                )

    def _build(self, settings: ProcessorSettings) -> None:
        for tag in settings.modalities:
            try:
                self._robots[tag] = Robot.build(tag, settings, self.config)
            except CheckpointError as error:
                self._refused[tag] = str(error)
        if not self._robots:
            raise CheckpointError(
                "checkpoint must have at least one embodiment that can run; got "
                f"{'; '.join(self._refused.values())}"
            )

    def _default_tag(self, embodiment: str | None) -> str | None:
        if embodiment is None or self.settings is None:
            return next(iter(self._robots)) if len(self._robots) == 1 else None
        try:
            return resolve_tag(embodiment, self._robots, self._refused)
        except RequestError as error:
            raise ConfigError(str(error)) from error

    # ------------------------------------------------------------ facts

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about this checkpoint."""
        if self.settings is None:
            return (
                f"no {CONFIG} in the checkpoint: only model requests can be served. "
                "Pass processor_dir.",
            )
        out = [f"embodiment {tag!r} cannot run: {why}" for tag, why in self._refused.items()]
        if self.backbone.folder is None:
            out.append(
                f"no tokenizer beside the checkpoint: {self.backbone.label} is asked for at the "
                "first observation. Pass backbone_dir."
            )
        return tuple(out)

    def tags(self) -> tuple[str, ...]:
        """Return the embodiments that can run, sorted."""
        return tuple(sorted(self._robots))

    def robot(self, embodiment: Any = None) -> Robot:
        """Return an embodiment by tag or alias; None = the default.

        Raises: RequestError listing the known tags.
        """
        if self.settings is None:
            raise RequestError(
                f"observations need the checkpoint's {CONFIG}; got none. Pass processor_dir, or "
                "send a model request."
            )
        if embodiment is None:
            if self._default is None:
                raise RequestError(
                    f"embodiment must be named: this checkpoint has {', '.join(self.tags())}; got "
                    'none. Send option "embodiment", or start with argument embodiment=TAG '
                    "(--arg embodiment=TAG)."
                )
            return self._robots[self._default]
        return self._robots[resolve_tag(embodiment, self._robots, self._refused)]

    def camera_names(self, embodiment: str | None = None) -> tuple[str, ...]:
        """Return the cameras an observation must hold, in order."""
        return self.robot(embodiment).modalities.video.keys

    def state_dim(self, embodiment: str | None = None) -> int:
        """Return the values of a raw state step."""
        return self.robot(embodiment).state_dim

    def expects(self) -> Mapping[str, Any]:
        """Return what an observation must hold, per embodiment and for the default one."""
        known = {tag: _expected(robot) for tag, robot in sorted(self._robots.items())}
        default: Mapping[str, Any] = {} if self._default is None else known[self._default]
        return {
            "cameras": default.get("cameras", ()),
            "state_dim": default.get("state_dim"),
            "prompt": True,
            "frames": default.get("frames", (0,)),
            "tokenizer": self.backbone.label,
            "embodiment": self._default,
            "embodiments": known,
        }

    # ------------------------------------------------------------ robot -> model

    def row(self, observation: Observation) -> GrootRow:
        """Return the model inputs of one observation.

        The embodiment is option ``embodiment``, else the default one.
        Raises: RequestError naming what is wrong.
        """
        robot = self.robot(observation.options.get("embodiment"))
        assert self.settings is not None  # robot() refuses otherwise
        modalities = robot.modalities
        raw = state_parts(observation.state, modalities.state, robot.state_widths)
        instruction = check_prompt(observation.prompt)
        if self.settings.formalize_language:
            instruction = formalize(instruction)
        frames = camera_frames(observation.images, modalities.video)
        # Time-major: all cameras of the oldest frame first.
        images = tuple(
            self.settings.recipe.apply(frames[camera][step])
            for step in range(modalities.video.steps)
            for camera in modalities.video.keys
        )
        inputs = self.backbone.load()
        pixel_values, grids = patch_rows(images, inputs.pixels)
        merge = self.config.merge
        counts = [frames * high * wide // merge for frames, high, wide in grids]
        return GrootRow(
            input_ids=inputs.tokenizer.encode(instruction, counts, self.max_text_tokens),
            images=images,
            pixel_values=pixel_values,
            grids=tuple(grids),
            state=self._padded_state(robot, raw),
            embodiment_id=robot.embodiment_id,
            embodiment=modalities.tag,
            raw_state=raw,
            instruction=instruction,
        )

    def _padded_state(
        self, robot: Robot, raw: Mapping[str, NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        values = np.concatenate(list(robot.normalize_state(raw).values()), axis=1)
        out = np.zeros((len(values), self.config.max_state_dim), dtype=np.float32)
        out[:, : values.shape[1]] = values
        return out

    # ------------------------------------------------------------ model -> robot

    def decode(self, actions: Any, row: GrootRow) -> tuple[NDArray[np.float32], tuple[str, ...]]:
        """Return the robot's commands of one row and the name of each column.

        Shapes: actions [horizon, max_action_dim], model space -> float32 [steps, values] of the
        row's embodiment, keys side by side in order.
        """
        robot = self._robots[row.embodiment]
        return robot.decode(_host_array(actions), row.raw_state), robot.action_names

    def model_space(self, actions: Any, row: GrootRow) -> NDArray[np.float32]:
        """Return robot commands in model space, against the row's state; inverse of ``decode``.

        Shapes: actions [T, values] robot units -> float32 [T, max_action_dim], zero-padded.
        Raises: RequestError for commands of another width or length.
        """
        values = self._robots[row.embodiment].encode(_host_array(actions), row.raw_state)
        out = np.zeros((len(values), self.config.max_action_dim), dtype=np.float32)
        out[:, : values.shape[1]] = values
        return out


def _expected(robot: Robot) -> dict[str, Any]:
    modalities = robot.modalities
    return {
        "cameras": modalities.video.keys,
        "frames": modalities.video.delta_indices,
        "state_dim": robot.state_dim,
        "state": robot.state_widths,
        "actions": {part.key: part.scaling.dim for part in robot.actions},
        "horizon": modalities.action.steps,
    }


def _host_array(actions: Any) -> NDArray[Any]:
    if isinstance(actions, torch.Tensor):
        actions = actions.detach().cpu().float().numpy()
    return np.asarray(actions)
