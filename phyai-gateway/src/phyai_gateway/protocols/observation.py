"""Check what a robot sent against the model's contract, and make parts of a request of it."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from math import isfinite, prod
from typing import Any

from phyai_gateway.contract import ModelContract
from phyai_gateway.decode.arrays import Array, Scalar, pack_float32
from phyai_gateway.decode.limits import MAX_IMAGE_PIXELS, MAX_STATE_VALUES, MAX_TEXT_BYTES
from phyai_gateway.messages import Fault, ImageData, InferReply, TensorData


def invalid(message: str) -> Fault:
    """Return the refusal of well-formed but wrong content."""
    return Fault("invalid_argument", message)


def names(found: Iterable[str]) -> str:
    """Return names for a message: sorted, at most ten, each cut to 64 characters."""
    known = sorted(found)
    shown = ", ".join(repr(name[:64]) for name in known[:10])
    return (shown or "none") + (f" and {len(known) - 10} more" if len(known) > 10 else "")


def picture(camera: str, value: object, contract: ModelContract) -> ImageData:
    """Return one image: uint8 or float in [0, 1], [H, W, 3] or [3, H, W].

    Raises: Fault naming the camera for another shape or dtype.
    """
    if not isinstance(value, Array):
        raise invalid(f"camera {camera!r} must be an array; got {type(value).__name__}.")
    shape = value.shape
    if len(shape) != 3 or 3 not in (shape[0], shape[2]):
        raise invalid(f"camera {camera!r} must be [H, W, 3] or [3, H, W]; got {list(shape)}.")
    chw = shape[0] == 3  # openpi's clients decide by the first size, too
    size = (shape[1], shape[2], 3) if chw else (shape[0], shape[1], 3)
    check_size(camera, size, contract)
    data = pixels(camera, value)
    return ImageData(camera, data, shape, layout="chw" if chw else "hwc")


def check_size(camera: str, size: tuple[int, ...], contract: ModelContract) -> None:
    """Raise Fault unless [H, W, C] is what the model takes of this camera."""
    if not 0 < prod(size[:2]) <= MAX_IMAGE_PIXELS:
        raise invalid(f"camera {camera!r} must have 1 to {MAX_IMAGE_PIXELS} pixels.")
    wanted = contract.cameras.get(camera)
    if wanted is not None and tuple(wanted) != size:
        raise invalid(f"camera {camera!r} must be {list(wanted)}; got {list(size)}. Resize it.")


def pixels(camera: str, value: Array) -> memoryview:
    """Return row-major uint8; floats in [0, 1] are scaled as openpi does: cut, not rounded.

    Raises: Fault for another dtype, or floats outside [0, 1].
    """
    if value.code == "u1":
        return value.row_major()
    if value.code not in ("f4", "f8"):
        raise invalid(f"camera {camera!r} must be uint8 or float; got {value.dtype}.")
    cells = array("d" if value.code == "f8" else "f", value.row_major().tobytes())
    if not (isfinite(sum(cells)) and min(cells) >= 0.0 and max(cells) <= 1.0):
        raise invalid(f"camera {camera!r} must have floats from 0 to 1. Send uint8 else.")
    # The product is rounded to the image's own precision before it is cut, as numpy does.
    return memoryview(bytes(map(int, array(cells.typecode, map((255.0).__mul__, cells)))))


def check_cameras(found: Collection[str], contract: ModelContract) -> None:
    """Raise Fault unless every camera that the model needs is there."""
    missing = [n for n in contract.cameras if n not in found and n not in contract.optional_cameras]
    if missing:
        raise invalid(
            f"model {contract.name!r} needs the cameras {names(missing)}; got {names(found)}."
        )


def numbers(value: object, what: str) -> list[float]:
    """Return a number, a vector [D] or [1, D], or a list of numbers as floats. Raises: Fault."""
    if isinstance(value, Array):
        if len(value.shape) > 2 or (len(value.shape) == 2 and value.shape[0] != 1):
            raise invalid(f"{what} must be [D]; got {list(value.shape)}.")
        return value.floats()
    if isinstance(value, list) and len(value) <= MAX_STATE_VALUES:
        return [number(item, what) for item in value]
    return [number(value, what)]


def number(value: object, what: str) -> float:
    """Return a real number that isn't a truth value. Raises: Fault."""
    plain = value.value if isinstance(value, Scalar) else value
    if isinstance(plain, bool) or not isinstance(plain, int | float):
        raise invalid(f"{what} must be a number; got {type(value).__name__}.")
    try:
        return float(plain)
    except OverflowError:
        raise invalid(f"{what} must fit into float32; got a larger number.") from None


def state_vector(values: list[float], contract: ModelContract) -> TensorData | None:
    """Return float32 [D]; None for no values and a model that wants none. Raises: Fault."""
    if contract.state_dim and len(values) != contract.state_dim:
        raise invalid(
            f"state of model {contract.name!r} must have {contract.state_dim} values; got "
            f"{len(values)}."
        )
    if not values:
        return None
    return TensorData(pack_float32(values, "state"), (len(values),), "float32")


def prompt(value: object, contract: ModelContract, max_bytes: int = MAX_TEXT_BYTES) -> str | None:
    """Return the task text; text, UTF-8 bytes, or None for the model's own. Raises: Fault."""
    if isinstance(value, bytes):
        if len(value) > max_bytes:
            raise invalid(f"prompt must have at most {max_bytes} bytes.")
        try:
            value = value.decode()
        except UnicodeDecodeError:
            raise invalid("prompt must be UTF-8 text.") from None
    if value is None:
        if contract.needs_prompt and contract.default_prompt is None:
            raise invalid(f"model {contract.name!r} needs a prompt; got none.")
        return contract.default_prompt
    if not isinstance(value, str):
        raise invalid(f"prompt must be text; got {type(value).__name__}.")
    if len(value) > max_bytes or len(value.encode("utf-8", "surrogatepass")) > max_bytes:
        raise invalid(f"prompt must have at most {max_bytes} bytes.")
    return value


def ends_session(fault: Fault) -> bool:
    """Return whether a stateful model's session can't go on after a fault.

    It is lost, or the model may have counted the request: the same number again would then give
    the actions of the older observation.
    """
    if fault.status == "failed_precondition":
        return fault.reason != "action_rejected"
    unsure = ("deadline_exceeded", "unavailable", "cancelled", "data_loss")
    return fault.started and fault.status in unsure


def own_settings(contract: ModelContract, protocol: str) -> Mapping[str, Any]:
    """Return ``contract.extra[protocol]``: what one protocol needs to know of the model."""
    found = contract.extra.get(protocol, {})
    return found if isinstance(found, Mapping) else {}


def chunk(reply: InferReply, contract: ModelContract, rows: int) -> TensorData:
    """Return the actions as float32 [rows, H, A].

    Raises: Fault ``data_loss`` when the reply isn't what the contract says.
    """
    actions = reply.actions
    shape = () if actions is None else actions.shape
    if len(shape) == 2:
        shape = (1, *shape)
    width = contract.action_dim
    good = actions is not None and len(shape) == 3 and actions.dtype == "float32"
    if not good or shape[0] != rows or (width and shape[2] != width):
        raise Fault("data_loss", f"model {contract.name!r} gave actions of another form.")
    assert actions is not None
    return TensorData(actions.data, shape, "float32")
