"""DROID observations: three cameras as one image, joints and gripper as action rows, and back.

A gripper command is 1 when closed on the robot's side and 0 in the model's, so it is inverted both
ways. Joint positions are radians and are not normalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from phyai.errors import RequestError, did_you_mean
from phyai.models.cosmos3.processing.aspects import tell_aspect
from phyai.models.cosmos3.processing.canvas import Size
from phyai.models.cosmos3.processing.checks import array_of, check_integer, float_rows
from phyai.models.cosmos3.processing.frames import Pixels, frame_of

IMAGE = "image"
WRIST, LEFT, RIGHT = "wrist_image_left", "exterior_image_1_left", "exterior_image_2_left"
CAMERAS = (WRIST, LEFT, RIGHT)
PREFIX = "observation/"
"""What the official client puts before every name of an observation but ``prompt``."""
JOINTS, GRIPPER = "joint_position", "gripper_position"
NUM_JOINTS = 7
ROW_NAMES = (*(f"joint_{i}" for i in range(NUM_JOINTS)), "gripper")
ROW_DIM = len(ROW_NAMES)
IMAGE_SIZE: Size = (540, 640)
"""Height and width of the composed image of the released policy."""
STRETCHED = "stretched. Send the three cameras, or compose them as the policy was trained on"


# ---------------------------------------------------------------- images


def observed_image(images: Any, size: Size | None = IMAGE_SIZE) -> Pixels:
    """Return the image the policy sees, uint8 [*size, 3].

    images: ``image`` (already composed; wins over the cameras) or all three cameras, with or
        without the official client's prefix.  size: None keeps the size it has.
    Raises: RequestError.
    """
    if not isinstance(images, Mapping):
        raise RequestError(
            f"images must be a mapping of camera name to image; got {type(images).__name__}. "
            f"Send {IMAGE}, or {', '.join(CAMERAS)}."
        )
    named = {_plain(name): value for name, value in images.items()}
    if IMAGE in named:
        whole = frame_of(f"image {IMAGE!r}", named[IMAGE])
        if size is not None:
            tell_aspect(f"image {IMAGE!r}", whole.shape[:2], size, STRETCHED)
    else:
        absent = [name for name in CAMERAS if name not in named]
        if absent:
            raise RequestError(
                f"images must hold {IMAGE}, or all of {', '.join(CAMERAS)}; got no "
                f"{', '.join(absent)}. Send all of them."
            )
        views = [frame_of(f"image {name!r}", named[name]) for name in CAMERAS]
        whole = compose(*views)
    return whole if size is None else resize_truncated(whole, size)


def _plain(name: Any) -> str:
    plain = name.removeprefix(PREFIX) if isinstance(name, str) else name
    if plain not in (IMAGE, *CAMERAS):
        raise RequestError(
            f"camera must be {IMAGE}, or one of {', '.join(CAMERAS)}; got {name!r}."
            f"{did_you_mean(str(name), (IMAGE, *CAMERAS))} Rename it."
        )
    return str(plain)


def compose(wrist: Pixels, left: Pixels, right: Pixels) -> Pixels:
    """Return the wrist view above both outer views, each half its height and half its width.

    Shapes: uint8 [h, w, 3] of any sizes -> uint8 [h + h // 2, w, 3] of the wrist's h and w.
    Raises: RequestError for a wrist view that has no half or an odd width.
    """
    height, width = wrist.shape[:2]
    if height < 2 or width < 2 or width % 2:
        raise RequestError(
            f"image {WRIST!r} must have an even width and two lines at least; got {height} x "
            f"{width}. Resize it with padding to 360 x 640."
        )
    half = (height // 2, width // 2)
    below = np.concatenate([resize_truncated(view, half) for view in (left, right)], axis=1)
    return np.concatenate([wrist, below], axis=0)


def resize_truncated(image: Pixels, size: Size) -> Pixels:
    """Return the image resized bilinearly without antialiasing, levels cut to whole numbers.

    Cut and not rounded, as the official server does; an image of ``size`` as it is. The same bytes
    with any number of threads.
    """
    if image.shape[:2] == size:
        return image
    # A colour per row: with one thread PyTorch rounds images of three channels in another way than
    # with more, which a cut at whole levels makes a difference of 1.
    levels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[:, None].float()
    resized = functional.interpolate(levels, size=size, mode="bilinear", align_corners=False)
    return np.ascontiguousarray(resized[:, 0].permute(1, 2, 0).numpy().astype(np.uint8))


# ---------------------------------------------------------------- states and actions


def joint_rows(joints: Any, gripper: Any, history: int = 1) -> NDArray[np.float32]:
    """Return the clean action rows of a request, oldest first, the present state last.

    joints: [7] or [T, 7] radians.  gripper: a number, [1], [T] or [T, 1]; 1 is closed.
    history: rows to keep, the state among them; 0 for a model that sees no state.
    Shapes: -> float32 [history, 8].
    Raises: RequestError.
    """
    positions = float_rows(JOINTS, joints, NUM_JOINTS)
    values = array_of(GRIPPER, gripper)
    values = values.reshape(1, 1) if values.ndim == 0 else values
    closed = float_rows(GRIPPER, values[:, None] if values.ndim == 1 else values, 1)
    return _last(np.concatenate(_equal(positions, closed), axis=1), history)


def state_rows(state: Any, history: int = 1) -> NDArray[np.float32]:
    """Return the clean action rows of a flat state: seven joints, then the gripper.

    state: [8] or [T, 8], robot units.  history and result: as in ``joint_rows``.
    Raises: RequestError.
    """
    if state is None:
        raise RequestError(f"state must be sent; got none. Send {', '.join(ROW_NAMES)}.")
    return _last(float_rows("state", state, ROW_DIM), history)


def _equal(
    positions: NDArray[np.float32], closed: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if len(positions) != len(closed):
        raise RequestError(
            f"{JOINTS} and {GRIPPER} must have as many rows; got {len(positions)} and "
            f"{len(closed)}. Send both of the same ticks."
        )
    return positions, closed


def _last(rows: NDArray[np.float32], history: int) -> NDArray[np.float32]:
    history = check_integer("history_length", history, 0, 64)
    if len(rows) < history:
        raise RequestError(
            f"state must have {history} rows, the last ticks up to now; got {len(rows)}. "
            "Send them oldest first."
        )
    return opened(rows[len(rows) - history :])


def opened(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows with the last channel, the gripper, inverted; to the model and back.

    >>> opened(np.array([[0.5, 0.25]], np.float32))
    array([[0.5 , 0.75]], dtype=float32)
    """
    out = np.array(rows, dtype=np.float32)
    out[..., -1] = np.float32(1.0) - out[..., -1]
    return out


def joint_actions(
    rows: NDArray[np.float32], history: int = 1, raw_dim: int = ROW_DIM
) -> NDArray[np.float32]:
    """Return the actions of the robot: the rows behind the history, gripper inverted, no clipping.

    Shapes: float32 [history + chunk, >= raw_dim] -> float32 [chunk, raw_dim].
    """
    return opened(rows[history:, :raw_dim])
