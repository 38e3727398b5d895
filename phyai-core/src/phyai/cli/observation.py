"""One observation from the options of `phyai run`: image files, state, prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.errors import ConfigError
from phyai.types import Observation

if TYPE_CHECKING:
    from phyai.manifest import AdapterManifest


def split_images(items: Sequence[str]) -> dict[str, Path]:
    """Return camera -> file of ``name=file`` options; ConfigError unless each file exists."""
    files: dict[str, Path] = {}
    for item in items:
        name, equals, file = item.partition("=")
        if not equals or not name.strip() or not file.strip():
            raise ConfigError(f"--image must look like camera=file.png; got {item!r}.")
        if name in files:
            raise ConfigError(f"--image must name a camera once; got {name!r} twice. Drop one.")
        files[name] = Path(file).expanduser()
        if not files[name].is_file():
            raise ConfigError(f"--image {name} must be an image file; got no file {file!r}.")
    return files


def read_image(file: Path, camera: str) -> Any:
    """Return an image file as uint8 [height, width, 3] RGB."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Exception as error:  # Pillow raises many kinds, also of its own
        raise ConfigError(
            f"--image {camera} must be a picture Pillow can read; got {str(file)!r} ({error})."
        ) from error


def parse_state(text: str | None) -> list[float] | None:
    """Return the numbers of ``0.1,-0.2,...``; None stays None."""
    if text is None:
        return None
    values = []
    for part in text.replace(",", " ").split():
        try:
            values.append(float(part))
        except ValueError:
            raise ConfigError(
                f"--state must be numbers such as 0.1,-0.2; got {part!r} in {text!r}."
            ) from None
        if not math.isfinite(values[-1]):
            raise ConfigError(f"--state must hold finite numbers; got {part!r}.")
    if not values:
        raise ConfigError(f"--state must hold at least one number; got {text!r}.")
    return values


def merge(
    sample: Observation | None,
    *,
    images: Mapping[str, Any],
    state: list[float] | None,
    prompt: str | None,
    options: Mapping[str, Any],
) -> Observation:
    """Return the sample with what was given put in its place; any image replaces all of them."""
    base = sample or Observation()
    return replace(
        base,
        images=dict(images) or base.images,
        state=base.state if state is None else state,
        prompt=base.prompt if prompt is None else prompt,
        options={**base.options, **options},
    )


def needs(
    expected: Mapping[str, Any], manifest: AdapterManifest, given: Observation | None = None
) -> str:
    """Return the sentence that tells a user what this checkpoint, or else its plugin, takes.

    given: only of what this observation lacks; "" when that is nothing.
    """
    lacks = given or Observation()
    parts = []
    cameras = expected.get("cameras") or manifest.capabilities.get("cameras")
    if cameras and _lack(cameras, lacks.images, bool(expected.get("optional_cameras"))):
        shown = " ".join(f"--image {name}=FILE" for name in cameras)
        some = expected.get("optional_cameras")
        parts.append(f"{shown} (cameras may be left out, not all)" if some else shown)
    width = expected.get("state_dim")
    if width and (lacks.state is None or _width(lacks.state) != width):
        parts.append(f"--state with {width} numbers")
    if expected.get("prompt") and not (isinstance(lacks.prompt, str) and lacks.prompt.strip()):
        parts.append('--prompt "..."')
    return f"It takes {', '.join(parts)}." if parts else ""


def _lack(cameras: Sequence[str], images: Mapping[str, Any], optional: bool) -> bool:
    """Return whether a view is absent. Other names are not judged: the plugin may know more."""
    if not images or any(name not in cameras for name in images):
        return not images
    return not optional and any(name not in images for name in cameras)


def _width(state: Any) -> int:
    """Return the numbers of one state; rows of a history come before it."""
    import numpy as np

    shape = np.shape(state)
    return shape[-1] if shape else 0
