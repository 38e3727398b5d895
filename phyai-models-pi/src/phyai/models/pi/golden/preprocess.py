"""Golden cases of preprocessing: images, normalisation, relative actions, robot contracts.

A file's kind is told by its tensor names. Every tensor is an input, or compared with what this
package computes for it; a result that no rule knows is infinitely wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.golden import Comparison, absolute, close, exact, unknown
from phyai.models.pi.config import BASE_CAMERAS
from phyai.models.pi.golden.case import HOST_ATOL, HOST_RTOL, beside, read_tensors
from phyai.models.pi.processing.images import (
    check_image,
    model_image,
    resize_with_pad_float,
    resize_with_pad_uint8,
)
from phyai.models.pi.processing.norm_stats import ACTION, STATE, load_stats, openpi_stats
from phyai.models.pi.processing.normalize import (
    OpenpiStats,
    lerobot_normalize,
    lerobot_unnormalize,
    make_bool_mask,
    openpi_normalize,
    openpi_unnormalize,
    relative_mask,
    to_absolute,
    to_relative,
)
from phyai.models.pi.processing.robots import ALOHA, DROID, LIBERO

IMAGE_ATOL = 1e-6
# openpi's torch resize runs on [-1, 1] and rounds in another order.
TORCH_RESIZE_ATOL = 5e-6
# One level of uint8: rounding in PIL's filter, whose versions may differ.
PIL_ATOL = 1.0
# The same level in [-1, 1]: the jax resize works on floats, ours rounds to uint8 as PIL does.
LEVEL_ATOL = 1.01 / 127.5
FLOAT64_ATOL = 1e-9

_INPUTS = re.compile(
    r"in\..+|[^.]+\.in_.+|norm\.stats\..+|aloha\.model_actions|droid\.(joint|gripper)"
)


@dataclass(frozen=True)
class Preprocess:
    """One preprocessing file: its kind and tensors."""

    path: Path
    root: Path
    kind: str
    tensors: Mapping[str, Tensor]

    def compare(self) -> list[Comparison]:
        """Return one comparison per tensor that is not an input."""
        rule = _RULES[self.kind]
        names = [name for name in self.tensors if not _INPUTS.fullmatch(name)]
        return [rule(self, name) or unknown(name) for name in names]

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor as an array.  Raises: CheckpointError."""
        if name not in self.tensors:
            raise CheckpointError(
                f"golden case {self.path.name} must hold {name!r}, which its results need; got "
                f"{', '.join(sorted(self.tensors))}. Copy the golden set again."
            )
        return np.asarray(self.tensors[name].numpy())

    def close(self, name: str, mine: Any, *, atol: float, rtol: float = 0.0) -> Comparison:
        got = torch.from_numpy(np.ascontiguousarray(mine))
        return close(name, got, self.tensors[name], atol=atol, rtol=rtol)

    def exact(self, name: str, mine: Any) -> Comparison:
        return exact(name, torch.from_numpy(np.ascontiguousarray(mine)), self.tensors[name])

    def size(self, name: str, *, chw: bool = False) -> tuple[int, int]:
        """Return (height, width) of an image tensor."""
        height, width = self.tensors[name].shape[-2:] if chw else self.tensors[name].shape[:2]
        return int(height), int(width)


def read_preprocess(path: Path, root: Path) -> Preprocess:
    """Return a preprocessing file; CheckpointError when it cannot be read or has no known kind."""
    tensors, _ = read_tensors(path)
    kinds = [kind for kind, sign in _SIGNS.items() if any(sign.match(name) for name in tensors)]
    if len(kinds) != 1:
        raise CheckpointError(
            f"golden case {path.name} must be of one known kind ({', '.join(_SIGNS)}); fits "
            f"{', '.join(kinds) or 'none'} with tensors {', '.join(sorted(tensors))}. "
            "Remove it from the set."
        )
    return Preprocess(path, root, kinds[0], tensors)


# ---------------------------------------------------------------- LeRobot


def _lerobot(case: Preprocess, name: str) -> Comparison | None:
    if name.endswith(".model_input_chw"):
        source = name.replace(".model_input_chw", ".in_uint8_chw")
        image = check_image(case.array(source), source, allow_uint8_chw=True)
        mine = model_image(image, case.size(name, chw=True), "lerobot")
        return absolute(name, mine, case.tensors[name], IMAGE_ATOL)
    match = re.fullmatch(r"norm\.(\w+)\.(unnorm_)?(state|action)", name)
    if match:
        mode, inverse, kind = match.groups()
        prefix = f"norm.stats.{STATE if kind == 'state' else ACTION}."
        stats = {
            n.removeprefix(prefix): case.array(n) for n in case.tensors if n.startswith(prefix)
        }
        convert = lerobot_unnormalize if inverse else lerobot_normalize
        out = convert(case.array(f"norm.in_{kind}"), stats, mode)
        return case.close(name, out, atol=HOST_ATOL, rtol=HOST_RTOL)
    if name in ("rel.mask", "rel.relative", "rel.absolute"):
        return _relative(case, name)
    return None


def _relative(case: Preprocess, name: str) -> Comparison:
    """Compare the mask with the dims the official conversions move, and both conversions."""
    actions, state = case.array("rel.in_action"), case.array("rel.in_state")
    dims = actions.shape[-1]
    moved = np.zeros(dims, dtype=bool)
    for converted in ("rel.relative", "rel.absolute"):
        differs = case.array(converted) != actions
        moved |= differs.reshape(-1, dims).any(axis=0)
    # The names that give this mask: excluded dims are called grippers.
    names = tuple(f"joint_{i}.pos" if on else f"Gripper_{i}.pos" for i, on in enumerate(moved))
    mask = relative_mask(dims, names, ("gripper",))
    if name == "rel.mask":
        return case.exact(name, np.asarray(mask))
    convert = to_relative if name == "rel.relative" else to_absolute
    return case.close(name, convert(actions, state, mask), atol=HOST_ATOL)


# ---------------------------------------------------------------- openpi images


def _openpi_images(case: Preprocess, name: str) -> Comparison | None:
    stem, _, what = name.rpartition(".")
    if what not in _OPENPI_RESIZES:
        return None
    image = check_image(case.array(f"{stem}.in_uint8"), stem)
    out, atol = _OPENPI_RESIZES[what](image, case.size(name))
    return case.close(name, out, atol=atol)


def _pil(image: NDArray[Any], size: tuple[int, int]) -> tuple[NDArray[Any], float]:
    return resize_with_pad_uint8(image, size), PIL_ATOL


def _model_input(image: NDArray[Any], size: tuple[int, int]) -> tuple[NDArray[Any], float]:
    return model_image(image, size, "openpi").numpy().transpose(1, 2, 0), LEVEL_ATOL


def _torch_resize(image: NDArray[Any], size: tuple[int, int]) -> tuple[NDArray[Any], float]:
    scaled = torch.from_numpy(image.astype(np.float32).transpose(2, 0, 1)) / 255 * 2 - 1
    out = resize_with_pad_float(scaled, size, pad=-1.0, value_range=(-1.0, 1.0))
    return out.numpy().transpose(1, 2, 0), TORCH_RESIZE_ATOL


Resize = Callable[[NDArray[Any], tuple[int, int]], tuple[NDArray[Any], float]]
_OPENPI_RESIZES: dict[str, Resize] = {
    "openpi_client_pil_uint8": _pil,
    "openpi_model_input_f32": _model_input,
    "openpi_jax_f32_hwc": _model_input,
    "openpi_torch_f32_hwc": _torch_resize,
}


# ---------------------------------------------------------------- openpi normalisation


def _openpi_norm(case: Preprocess, name: str) -> Comparison | None:
    match = re.fullmatch(r"stats\.(state|actions)\.(mean|std|q01|q99)", name)
    if match:
        kind, stat = match.groups()
        values = getattr(_stats(case, kind), stat)
        return None if values is None else case.exact(name, values)
    match = re.fullmatch(r"stats(\d*)\.(zscore|quantile)\.(norm|unnorm)_(state|actions)", name)
    if not match:
        return None
    width, mode, way, kind = match.groups()
    stats = _stats(case, kind)
    if width and kind == "state":  # statistics zero-padded to the model's width
        stats = _padded(stats, int(width))
    quantiles = mode == "quantile"
    if way == "norm":
        out = openpi_normalize(case.array(f"in.{kind}"), stats, use_quantiles=quantiles)
    else:
        out = openpi_unnormalize(case.array(f"in.model_{kind}"), stats, use_quantiles=quantiles)
    return case.close(name, out, atol=FLOAT64_ATOL, rtol=HOST_RTOL)


def _stats(case: Preprocess, kind: str) -> OpenpiStats:
    file = beside(case.path, case.root, "norm_stats.json")
    stats = openpi_stats(load_stats(file), STATE if kind == "state" else ACTION)
    if stats is None:
        raise CheckpointError(
            f"{file.name} of golden case {case.path.name} must hold statistics of {kind!r}; got "
            "none. Copy the golden set again."
        )
    return stats


def _padded(stats: OpenpiStats, width: int) -> OpenpiStats:
    def pad(values: NDArray[Any] | None) -> NDArray[Any]:
        values = np.zeros(0) if values is None else values
        return np.pad(values, (0, max(width - len(values), 0)))

    return OpenpiStats(pad(stats.mean), pad(stats.std), pad(stats.q01), pad(stats.q99))


# ---------------------------------------------------------------- openpi robots


def _openpi_robot(case: Preprocess, name: str) -> Comparison | None:
    match = re.fullmatch(r"(delta|absolute)((?:_-?\d+)+)", name)
    if match:
        mask = make_bool_mask(*(int(run) for run in match[2].split("_")[1:]))
        convert = to_relative if match[1] == "delta" else to_absolute
        out = convert(case.array("in.actions"), case.array("in.state"), mask)
        return case.close(name, out, atol=HOST_ATOL)
    robot, _, what = name.partition(".")
    rule = _ROBOT_RULES.get(robot)
    return None if rule is None else rule(case, name, what)


def _aloha(case: Preprocess, name: str, what: str) -> Comparison | None:
    if what == "actions_pi":
        out = ALOHA.encode_actions(case.array("aloha.in_actions"))
        return case.close(name, out, atol=FLOAT64_ATOL)
    if what == "robot_actions":
        out = ALOHA.from_model(case.array("aloha.model_actions"))
        return case.close(name, out, atol=FLOAT64_ATOL)
    image = case.array("aloha.in_cam_high_chw")
    images = {"cam_high": image, "cam_low": image}
    if what == "image_mask":  # the file does not say otherwise which wrist cameras were sent
        sent = zip(list(ALOHA.cameras)[1:], case.array(name)[1:], strict=False)
        images.update({camera: image for camera, on in sent if on})
    inputs = ALOHA.to_model({"images": images, "state": case.array("aloha.in_state")})
    if what == "image_mask":
        return case.exact(name, _image_mask(inputs.images))
    if what == "state_pi":
        return case.close(name, inputs.state, atol=FLOAT64_ATOL)
    slot = what.removesuffix("_hwc")
    return case.exact(name, inputs.images[slot]) if slot in inputs.images else None


def _droid(case: Preprocess, name: str, what: str) -> Comparison | None:
    image = np.zeros((24, 30, 3), np.uint8)
    inputs = DROID.to_model(
        {
            **dict.fromkeys(DROID.cameras, image),
            "observation/joint_position": case.array("droid.joint"),
            "observation/gripper_position": case.array("droid.gripper"),
        }
    )
    if what == "state":
        return case.exact(name, inputs.state)
    return case.exact(name, _image_mask(inputs.images)) if what == "image_mask" else None


def _libero(case: Preprocess, name: str, what: str) -> Comparison | None:
    image = np.zeros((24, 30, 3), np.uint8)
    state = np.zeros(LIBERO.state_dim)
    inputs = LIBERO.to_model({**dict.fromkeys(LIBERO.cameras, image), "observation/state": state})
    return case.exact(name, _image_mask(inputs.images)) if what == "image_mask" else None


def _image_mask(slots: Mapping[str, Any]) -> NDArray[np.bool_]:
    return np.array([camera in slots for camera in BASE_CAMERAS])


_ROBOT_RULES: dict[str, Callable[[Preprocess, str, str], Comparison | None]] = {
    "aloha": _aloha,
    "droid": _droid,
    "libero": _libero,
}

_SIGNS = {
    "lerobot": re.compile(r".+\.in_uint8_chw$|(norm|rel)\.in_state$"),
    "openpi images": re.compile(r".+\.openpi_client_pil_uint8$"),
    "openpi normalisation": re.compile(r"stats\.(zscore|quantile)\."),
    "openpi robots": re.compile(r"(aloha|droid|libero)\."),
}
_RULES: dict[str, Callable[[Preprocess, str], Comparison | None]] = {
    "lerobot": _lerobot,
    "openpi images": _openpi_images,
    "openpi normalisation": _openpi_norm,
    "openpi robots": _openpi_robot,
}
