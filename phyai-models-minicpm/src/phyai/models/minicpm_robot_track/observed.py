"""What a robot sent: frames of one camera, or features of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.errors import RequestError, did_you_mean
from phyai.models.minicpm.frames import MAX_SIDE, Pixels, frame_array, frame_levels
from phyai.models.minicpm_robot_track.config import MiniCPMRobotTrackConfig
from phyai.models.minicpm_robot_track.vision import resize
from phyai.request_values import checked, host_tensor
from phyai.types import Observation

CAMERA = "front"
MIN_SIDE, MAX_ASPECT = 2, 200


def most_frames(config: MiniCPMRobotTrackConfig) -> int:
    """Return how many frames one request may bring: the history and the current one."""
    return config.history_frames + 1


def camera_frames(observation: Observation, config: MiniCPMRobotTrackConfig, side: int) -> Tensor:
    """Return the frames that can matter as the towers see them, uint8 [N, 3, side, side].

    The camera's value: uint8 [height, width, 3], or float in [0, 1] of that shape or channels
    first; with a leading axis of frames, oldest first, when there are several.
    Raises: RequestError.
    """
    images = observation.images
    if not isinstance(images, Mapping):
        raise RequestError(
            f"images must be a mapping of camera name to image; got {type(images).__name__}. "
            f"Send {CAMERA!r}."
        )
    for name in images:
        if name != CAMERA:
            raise RequestError(
                f"camera must be {CAMERA!r}; got {name!r}.{did_you_mean(str(name), [CAMERA])} "
                "Rename it, and send one camera."
            )
    if CAMERA not in images:
        raise RequestError(
            f"images must hold camera {CAMERA!r}; got none. Send its frame, or the options "
            "coarse_tokens and fine_tokens."
        )
    frames = _frames(images[CAMERA], most_frames(config))[-config.kept_frames :]
    made = np.stack([resize(np.ascontiguousarray(frame), side) for frame in frames])
    return torch.from_numpy(made).permute(0, 3, 1, 2)


def given_features(
    observation: Observation, config: MiniCPMRobotTrackConfig
) -> tuple[Tensor, Tensor]:
    """Return the coarse features that can matter [N, coarse, C] and fine ones [fine, C].

    Options: coarse_tokens float [frames, coarse, C] or [coarse, C], fine_tokens float [fine, C] or
    [1, fine, C] of the newest frame.  Raises: RequestError.
    """
    if observation.images:
        raise RequestError(
            "an observation must hold images or the options coarse_tokens and fine_tokens; got "
            "both. Send one of them."
        )
    count, width = config.coarse_tokens_per_frame, config.vision_feature_dim
    coarse = _lifted("option coarse_tokens", observation.options.get("coarse_tokens"), 3)
    coarse = checked("option coarse_tokens", coarse, (None, count, width))
    if not 1 <= len(coarse) <= most_frames(config):
        raise RequestError(
            f"option coarse_tokens must hold 1 to {most_frames(config)} frames; got "
            f"{len(coarse)}. Send the newest ones, oldest first."
        )
    fine = _lifted("option fine_tokens", observation.options.get("fine_tokens"), 3)
    fine = checked("option fine_tokens", fine, (1, config.fine_tokens_current_frame, width))
    return coarse[-config.kept_frames :], fine[0]


def _lifted(name: str, value: Any, dims: int) -> Tensor:
    """Return a tensor with a leading axis of one where it has an axis less."""
    if value is None:
        raise RequestError(f"{name} must be sent beside the other one; got none. Send both.")
    tensor = host_tensor(name, value)
    return tensor[None] if tensor.ndim == dims - 1 else tensor


def _frames(value: Any, most: int) -> Pixels:
    """Return uint8 [N, height, width, 3]."""
    array = frame_array(CAMERA, value)
    floating = array.dtype.kind == "f"
    shape = list(array.shape)
    if array.ndim == 3:
        array = array[None]
    if array.ndim == 4 and floating and array.shape[-1] != 3 and array.shape[1] == 3:
        array = np.moveaxis(array, 1, -1)
    if array.ndim != 4 or array.shape[-1] != 3 or not 1 <= len(array) <= most:
        raise RequestError(
            f"image of camera {CAMERA!r} must be RGB [height, width, 3], or 1 to {most} frames of "
            f"it, oldest first; got shape {shape}. Send frames as the camera gives them."
        )
    short, long = sorted(array.shape[1:3])
    if short < MIN_SIDE or long > MAX_SIDE or long > MAX_ASPECT * short:
        raise RequestError(
            f"image of camera {CAMERA!r} must have sides in [{MIN_SIDE}, {MAX_SIDE}], one at most "
            f"{MAX_ASPECT} times the other; got {array.shape[1]} x {array.shape[2]}. Check the "
            "camera."
        )
    return frame_levels(CAMERA, array)
