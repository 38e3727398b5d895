"""From an observation to the model's inputs, and from its actions to robot commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.adapter import is_integer
from phyai.errors import (
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    RequestError,
    did_you_mean,
)
from phyai.models.minicpm.frames import Pixels, resize
from phyai.models.minicpm.text import TOKENIZER, check_prompt
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.minicpm_robot.processing.contracts import (
    CHANNELS,
    CONTRACTS,
    RobotContract,
    find_contract,
)
from phyai.models.minicpm_robot.processing.images import Grid, camera_frame, patch_rows
from phyai.models.minicpm_robot.processing.layouts import (
    columns,
    decode_actions,
    expected_state,
    flat_width,
    pack_state,
)
from phyai.models.minicpm_robot.processing.prompts import (
    ImageText,
    PromptTokenizer,
)
from phyai.models.minicpm_robot.processing.settings import PREPROCESSOR, ImageSettings
from phyai.models.minicpm_robot.processing.slicing import make_views, plan_views
from phyai.models.minicpm_robot.processing.template import TEMPLATE, read_layout
from phyai.types import Observation

MAX_CAMERAS = 64


@dataclass(frozen=True, slots=True)
class MiniCPMRow:
    """The model inputs of one observation, and what decoding its actions needs.

    input_ids: int64 [S], unpadded.  pixel_values: float32 [P, 3 * patch * patch], the patches of
    all views.  grids: every view's (rows, columns) in patches.  state: float32 [state_dim].
    instruction: the text the model sees.  info: what the result should say about its making.
    """

    input_ids: NDArray[np.int64]
    pixel_values: Tensor
    grids: tuple[Grid, ...]
    state: NDArray[np.float32]
    embodiment_id: int
    instruction: str
    contract: RobotContract
    info: Mapping[str, Any] = field(default_factory=dict)


class Processor:
    """Host-side processing of one checkpoint; see ``from_checkpoint``.

    Example:
        processor = Processor.from_checkpoint(folder, config, "libero")
        row = processor.row(Observation(images=frames, state=pose, prompt="open the drawer"))
        commands, names, units = processor.decode(model_actions, row)
    """

    def __init__(
        self,
        config: MiniCPMRobotConfig,
        settings: ImageSettings,
        tokenizer: PromptTokenizer | None,
        contract: RobotContract,
        *,
        embodiment_id: int | None = None,
        max_text_tokens: int = 512,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self.config, self.settings, self.tokenizer = config, settings, tokenizer
        self.max_text_tokens, self.warnings = max_text_tokens, warnings
        self._contract, self._embodiment_id = contract, embodiment_id
        try:
            self._check_contract(contract)
            self._embodiment(contract, None)
        except RequestError as error:
            raise ConfigError(str(error)) from error

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | Path | None,
        config: MiniCPMRobotConfig,
        contract: str | RobotContract | None = None,
        *,
        embodiment_id: int | None = None,
        tokenizer: str | Path | None = None,
        processor_dir: str | Path | None = None,
        max_text_tokens: int = 512,
    ) -> Processor:
        """Return the processor of a checkpoint folder.

        contract: of observations that name none; None = ``raw``.
        embodiment_id: of observations that name none; None = their contract's.
        tokenizer: tokenizer.json or its folder, when not beside the other files.
        processor_dir: folder of tokenizer, chat template and image settings, when not the
            checkpoint.
        Without tokenizer or chat template only model requests can be served; ``warnings`` says so.
        Raises: CheckpointError and its kinds for files of another model; ConfigError for a contract
            or embodiment that cannot run.
        """
        chosen = contract if isinstance(contract, RobotContract) else find_contract(contract)
        place = folder if processor_dir is None else processor_dir
        files = None if place is None else Path(place)
        if processor_dir is not None and not Path(processor_dir).is_dir():
            raise CheckpointNotFound(
                f"processor_dir must be a folder; got {str(processor_dir)!r}. Check the path."
            )
        settings = (None if files is None else ImageSettings.from_folder(files)) or _defaults(
            config
        )
        _check_settings(settings, config)
        made, warnings = _load_tokenizer(files, tokenizer, settings, config)
        return cls(
            config,
            settings,
            made,
            chosen,
            embodiment_id=embodiment_id,
            max_text_tokens=max_text_tokens,
            warnings=warnings,
        )

    # ------------------------------------------------------------ facts

    def contract(self, name: Any = None) -> RobotContract:
        """Return a contract by name; None = the default one.

        Raises: RequestError listing the known ones.
        """
        if name is None or name == self._contract.name:
            return self._contract
        try:
            found = find_contract(name)
        except ConfigError as error:
            raise RequestError(str(error)) from error
        self._check_contract(found)
        return found

    def expects(self) -> Mapping[str, Any]:
        """Return what an observation must hold, for the default contract and for the others."""
        known = {name: self._expected(contract) for name, contract in CONTRACTS.items()}
        default = self._expected(self._contract)
        return {
            "cameras": default["cameras"],
            "state_dim": flat_width(self._contract, self.config.head.state_dim),
            "state": default["state"],
            "prompt": True,
            "contract": self._contract.name,
            "contracts": {**known, self._contract.name: default},
        }

    def _expected(self, contract: RobotContract) -> dict[str, Any]:
        names = columns(contract, self.config.head.action_dim)
        return {
            "cameras": contract.cameras,
            "state": expected_state(contract, self.config.head.state_dim),
            "embodiment_id": contract.embodiment_id,
            "control_hz": contract.control_hz,
            "actions": tuple(name for name, _ in names),
            "notes": contract.notes,
        }

    def _check_contract(self, contract: RobotContract) -> None:
        head = self.config.head
        if not contract.raw and (head.state_dim, head.action_dim) != (CHANNELS, CHANNELS):
            raise RequestError(
                f"contract {contract.name!r} needs {CHANNELS} state and action channels; this "
                f"checkpoint has {head.state_dim} and {head.action_dim}. Use contract 'raw'."
            )

    # ------------------------------------------------------------ robot -> model

    def row(self, observation: Observation) -> MiniCPMRow:
        """Return the model inputs of one observation.

        Options ``contract`` and ``embodiment_id`` replace the defaults.
        Raises: RequestError naming what is wrong.
        """
        if self.tokenizer is None:
            raise RequestError(
                f"observations need {TOKENIZER} and {TEMPLATE}; this checkpoint came without. "
                "Pass processor_dir, or send a model request."
            )
        contract = self.contract(observation.options.get("contract"))
        embodiment = self._embodiment(contract, observation.options.get("embodiment_id"))
        info: dict[str, Any] = {"contract": contract.name, "embodiment_id": embodiment}
        width = self.config.head.state_dim
        if contract.raw and observation.state is None:
            # As the official wrapper does; a robot's contract would refuse this.
            state = np.zeros(width, dtype=np.float32)
            info["state"] = "zeros"
        else:
            state = pack_state(observation.state, contract, width)
        instruction = contract.instruction(check_prompt(observation.prompt))
        views, texts = self._views(_frames(observation.images, contract))
        ids = self.tokenizer.encode(instruction, texts, self.max_text_tokens)
        pixel_values, grids = patch_rows(views, self.settings)
        return MiniCPMRow(
            ids, pixel_values, tuple(grids), state, embodiment, instruction, contract, info
        )

    def _views(self, frames: list[Pixels]) -> tuple[list[Pixels], list[ImageText]]:
        """Return all images the model sees, and per frame what they are in the prompt."""
        side = self.config.image_size
        views: list[Pixels] = []
        texts = []
        for frame in frames:
            made, slices = make_views(resize(frame, (side, side)), self.settings)
            block = self.settings.block
            tokens = [(view.shape[0] // block) * (view.shape[1] // block) for view in made]
            texts.append(ImageText(tokens, slices))
            views += made
        return views, texts

    def _embodiment(self, contract: RobotContract, given: Any) -> int:
        for value in (given, self._embodiment_id):
            if value is not None:
                break
        else:
            value = contract.embodiment_id
        if not is_integer(value):
            raise RequestError(
                f"embodiment_id must be an integer; got {value!r}. Send the number of a bank."
            )
        head = self.config.head
        if head.shared_head:
            return int(value)  # one bank for all
        if not 0 <= value < head.max_num_embodiments:
            raise RequestError(
                f"embodiment_id must be in [0, {head.max_num_embodiments}); got {value}. Send the "
                "number of a bank this checkpoint has."
            )
        return int(value)

    # ------------------------------------------------------------ model -> robot

    def decode(
        self, actions: Any, row: MiniCPMRow
    ) -> tuple[NDArray[np.float32], tuple[str, ...], tuple[str, ...]]:
        """Return the robot's commands of one row, and name and unit of each column.

        Shapes: actions [H, action_dim], model space -> float32 [H, A] of the row's contract.
        A step whose prediction is no rotation holds NaN, which no robot may be sent.
        """
        if isinstance(actions, torch.Tensor):
            actions = actions.detach().cpu().float().numpy()
        commands = decode_actions(np.asarray(actions, dtype=np.float32), row.contract)
        names, units = zip(*columns(row.contract, commands.shape[1]), strict=True)
        return commands, names, units


def _frames(images: Any, contract: RobotContract) -> list[Pixels]:
    """Return the frames in the model's order.  Raises: RequestError naming the camera."""
    if not isinstance(images, Mapping) or not images:
        raise RequestError(
            f"images must be a mapping of camera name to image; got {type(images).__name__}"
            f"{' with none' if isinstance(images, Mapping) else ''}. Send "
            f"{', '.join(contract.cameras) or 'one or more'}."
        )
    names = contract.cameras or tuple(images)
    for name in images:
        if name not in names:
            raise RequestError(
                f"camera must be one of {', '.join(names)}; got {name!r}."
                f"{did_you_mean(str(name), names)} Rename it."
            )
    if absent := [name for name in names if name not in images]:
        raise RequestError(
            f"images must hold every camera of contract {contract.name!r} ({', '.join(names)}); "
            f"got no {', '.join(absent)}. Send all of them."
        )
    if len(names) > MAX_CAMERAS:
        raise RequestError(
            f"images must be at most {MAX_CAMERAS} cameras; got {len(names)}. Send fewer."
        )
    return [camera_frame(str(name), images[name]) for name in names]


# ---------------------------------------------------------------- files


def _defaults(config: MiniCPMRobotConfig) -> ImageSettings:
    return ImageSettings(
        scale_resolution=config.image_size,
        patch_size=config.vision.patch_size,
        downsample_mode=config.downsample_mode,
    )


def _check_settings(settings: ImageSettings, config: MiniCPMRobotConfig) -> None:
    got = settings.patch_size, settings.downsample_mode
    want = config.vision.patch_size, config.downsample_mode
    if got != want:
        raise CheckpointError(
            f"{PREPROCESSOR} must have patch_size and downsample_mode {want}, as config.json says; "
            f"got {got}. Pass the files of one checkpoint."
        )


def _load_tokenizer(
    files: Path | None,
    tokenizer: str | Path | None,
    settings: ImageSettings,
    config: MiniCPMRobotConfig,
) -> tuple[PromptTokenizer | None, tuple[str, ...]]:
    """Return the tokenizer, or None and what is missing for one."""
    path = None if files is None else files / TOKENIZER
    if tokenizer is not None:
        given = Path(tokenizer)
        path = given / TOKENIZER if given.is_dir() else given
        if not path.is_file():
            raise CheckpointNotFound(
                f"tokenizer must be {TOKENIZER} or its folder; got {str(tokenizer)!r}. "
                "Check the path."
            )
    layout = None if files is None else read_layout(files)
    if layout is None and path is not None and path.is_file():
        layout = read_layout(path.parent)
    absent = []
    if path is None or not path.is_file():
        absent.append(TOKENIZER)
    if layout is None:
        absent.append(f"chat template ({TEMPLATE})")
    if absent:
        return None, (
            f"no {' and no '.join(absent)} in the checkpoint: only model requests can be served. "
            "Pass processor_dir.",
        )
    assert path is not None
    assert layout is not None
    side = config.image_size
    made = PromptTokenizer(
        path,
        layout,
        image_token_id=config.image_token_id,
        vocab_size=config.text.vocab_size,
        numbered=settings.use_image_id,
        sliced=plan_views(side, side, settings).slices != (0, 0),
    )
    return made, ()
