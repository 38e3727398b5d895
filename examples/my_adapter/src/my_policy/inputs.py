"""From an Observation to tensors: every check of a request is here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from phyai.errors import RequestError
from phyai.types import Observation
from torch import Tensor
from torch.nn import functional

from my_policy.config import PolicyConfig


def row_tensors(observation: Observation, config: PolicyConfig) -> dict[str, Tensor]:
    """Return image [3, S, S] in [-1, 1], state [D], tokens int64 [L] and their length [].

    Raises: RequestError for whatever the policy was not made for.
    """
    tokens, length = prompt_tokens(observation.prompt, config)
    return {
        "image": camera_image(observation.images, config),
        "state": robot_state(observation.state, config),
        "tokens": tokens,
        "length": length,
    }


def camera_image(images: Any, config: PolicyConfig) -> Tensor:
    """Return the camera's image [3, S, S] float32 in [-1, 1]."""
    names = sorted(images)
    if names != [config.camera]:
        raise RequestError(f"images must be those of camera {config.camera!r}; got {names}.")
    image = np.asarray(images[config.camera])
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise RequestError(
            f"image {config.camera!r} must be uint8 [height, width, 3]; got {image.dtype} "
            f"{list(image.shape)}."
        )
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 127.5 - 1.0
    size = (config.image_size, config.image_size)
    if tuple(pixels.shape[1:]) == size:
        return pixels
    resized = functional.interpolate(pixels[None], size, mode="bilinear", antialias=True)
    return resized[0]


def robot_state(state: Any, config: PolicyConfig) -> Tensor:
    """Return the normalised state [D] float32."""
    try:
        values = np.asarray(state, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise RequestError(f"state must be numbers; got {state!r}.") from error
    if values.shape != (config.state_dim,) or not np.isfinite(values).all():
        raise RequestError(
            f"state must be {config.state_dim} finite numbers; got {list(values.shape)} {state!r}."
        )
    mean = np.asarray(config.state_mean, dtype=np.float32)
    std = np.asarray(config.state_std, dtype=np.float32)
    return torch.from_numpy((values - mean) / std)


def prompt_tokens(prompt: Any, config: PolicyConfig) -> tuple[Tensor, Tensor]:
    """Return one token per word, int64 [L] padded with 0, and how many there are."""
    words = prompt.lower().split() if isinstance(prompt, str) else []
    if not 1 <= len(words) <= config.max_words:
        raise RequestError(f"prompt must be 1 to {config.max_words} words; got {prompt!r}.")
    unknown = [word for word in words if word not in config.words]
    if unknown:
        raise RequestError(
            f"prompt must use the policy's words; got {unknown[0]!r}. "
            f"Known: {', '.join(sorted(config.words))}."
        )
    tokens = torch.zeros(config.max_words, dtype=torch.int64)
    tokens[: len(words)] = torch.tensor([config.words.index(word) + 1 for word in words])
    return tokens, torch.tensor(len(words))
