"""Pictures of a request as uint8 arrays; sizes are known and checked before pixels are decoded."""

from __future__ import annotations

import io
import warnings
from math import prod
from typing import Any

import numpy as np

from phyai_gateway.messages import Fault, ImageData

MAX_SIDE = 16384
_FORMATS = {"jpeg": "JPEG", "png": "PNG"}
_MODES = ("RGB", "L", "RGBA", "P", "1", "LA")  # what converts to RGB without a guess


def decode_image(image: ImageData, max_pixels: int) -> np.ndarray[Any, Any]:
    """Return uint8 [H, W, 3], or [..., H, W, 3] for a raw batch or several frames, in C order.

    max_pixels: of one picture. Raises: Fault(invalid_argument) naming the image.
    """
    if image.encoding == "raw":
        return _raw(image, max_pixels)
    return _file(image, max_pixels)


def _raw(image: ImageData, max_pixels: int) -> np.ndarray[Any, Any]:
    if image.dtype != "uint8":
        raise _bad(image, "must be UINT8", image.dtype)
    shape = image.shape
    if len(shape) not in (3, 4, 5) or any(size < 1 or size > MAX_SIDE for size in shape):
        raise _bad(image, "must have shape [H, W, 3] or [B, H, W, 3]", list(shape))
    channels_last = image.layout == "hwc"
    height, width, channels = shape[-3:] if channels_last else (*shape[-2:], shape[-3])
    if channels != 3:
        rule = "must have 3 channels, the last dim of HWC and the first of CHW"
        raise _bad(image, rule, f"{list(shape)} {image.layout.upper()}")
    _check_pixels(image, height, width, max_pixels)
    data = memoryview(image.data)
    if data.nbytes != prod(shape):
        raise _bad(image, f"must have {prod(shape)} bytes for shape {list(shape)}", data.nbytes)
    pixels = np.frombuffer(data, np.uint8).reshape(shape)
    if channels_last:
        return pixels
    return np.ascontiguousarray(np.moveaxis(pixels, -3, -1))


def _file(image: ImageData, max_pixels: int) -> np.ndarray[Any, Any]:
    from PIL import Image

    wanted = _FORMATS[image.encoding]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(image.data), formats=(wanted,)) as opened:
                # Nothing but the header has been read so far.
                _check_file(image, opened, max_pixels)
                pixels = np.asarray(opened.convert("RGB"))
    except Fault:
        raise
    except Image.DecompressionBombError:
        raise _bad(image, f"must have at most {max_pixels} pixels", "many more") from None
    except Exception:  # a decoder may fail in any way on bytes made for it; the text is its own
        raise _bad(image, f"must be a whole {wanted} file", "one that cannot be read") from None
    return pixels


def _check_file(image: ImageData, opened: Any, max_pixels: int) -> None:
    width, height = opened.size
    _check_pixels(image, height, width, max_pixels)
    if opened.mode not in _MODES:
        raise _bad(image, "must be 8-bit RGB or grey", f"mode {opened.mode}")
    if getattr(opened, "n_frames", 1) != 1:
        raise _bad(image, "must be one picture", "an animation")
    if not image.shape:
        return
    sizes = image.shape[-2:] if image.layout == "chw" else image.shape[-3:-1]
    if len(image.shape) != 3 or tuple(sizes) != (height, width):
        rule = f"must have the shape it declares, {list(image.shape)} {image.layout.upper()}"
        raise _bad(image, rule, f"{height} x {width} in the file")


def _check_pixels(image: ImageData, height: int, width: int, max_pixels: int) -> None:
    if height * width > max_pixels or max(height, width) > MAX_SIDE:
        raise _bad(
            image,
            f"must have at most {max_pixels} pixels and {MAX_SIDE} per side",
            f"{height} x {width}",
        )


def _bad(image: ImageData, rule: str, got: object) -> Fault:
    return Fault("invalid_argument", f"image {image.name!r} {rule}; got {got}.")
