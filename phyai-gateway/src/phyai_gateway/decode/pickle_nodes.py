"""What the pickle reader yields for classes and functions: inert records, nothing importable.

The table lists every (module, name) pair that a genuine LeRobot client writes. Names are compared
as text; nothing is looked up anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phyai_gateway.decode.arrays import Array, column_major, make_array, make_scalar, parse_dtype
from phyai_gateway.decode.limits import MAX_RANK, DecodeError

_HELPERS = "lerobot.async_inference.helpers"
_CLASSES = ("RemotePolicyConfig", "TimedObservation", "TimedAction")
_NUMPY = ("numpy._core", "numpy.core")


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function of the table; ``kind`` says what the reader does with it."""

    kind: str


@dataclass(slots=True)
class Instance:
    """An object of one of LeRobot's three classes: the name and its state, once set."""

    name: str
    state: dict[str, Any] | None = None


@dataclass(slots=True)
class DtypeNode:
    """A numpy dtype under construction."""

    code: str
    order: str | None = None

    @property
    def text(self) -> str:
        return (self.order or "|").replace("=", "<") + self.code


@dataclass(slots=True)
class ArrayNode:
    """A numpy array under construction; ``array`` is None until its state came."""

    array: Array | None = None


@dataclass(frozen=True, slots=True)
class LongText:
    """UTF-8 text too long for a prompt: array bytes of pickle protocol 2, not decoded yet."""

    data: memoryview


GLOBALS: dict[tuple[str, str], Global] = {
    **{(_HELPERS, name): Global(name) for name in _CLASSES},
    **{(f"{core}.multiarray", "_reconstruct"): Global("reconstruct") for core in _NUMPY},
    **{(f"{core}.numeric", "_frombuffer"): Global("frombuffer") for core in _NUMPY},
    **{(f"{core}.multiarray", "scalar"): Global("scalar") for core in _NUMPY},
    ("numpy", "ndarray"): Global("ndarray"),
    ("numpy", "dtype"): Global("dtype"),
    ("_codecs", "encode"): Global("encode"),
}


def find_global(module: object, name: object) -> Global:
    """Return the entry of the table. Raises: DecodeError for any other pair."""
    if isinstance(module, str) and isinstance(name, str):
        found = GLOBALS.get((module, name))
        if found is not None:
            return found
    raise DecodeError("payload names a class or function that observations don't use.")


def new_instance(cls: object, args: object) -> Instance:
    """Return an empty record of one of the three classes. Raises: DecodeError."""
    if not isinstance(cls, Global) or cls.kind not in _CLASSES or args != ():
        raise DecodeError("payload builds an object that observations don't use.")
    return Instance(cls.kind)


def apply(function: object, args: object) -> object:
    """Return the record of a call of one of numpy's rebuilders. Raises: DecodeError."""
    if isinstance(function, Global) and type(args) is tuple:
        if function.kind == "reconstruct" and _plain_reconstruct(args):
            return ArrayNode()
        if function.kind == "dtype" and len(args) == 3 and args[1:] == (False, True):
            parse_dtype(args[0])
            return DtypeNode(args[0])
        if function.kind == "scalar" and len(args) == 2 and isinstance(args[0], DtypeNode):
            return make_scalar(args[0].text, args[1])
        if function.kind == "frombuffer" and len(args) in (4, 5):
            return _from_buffer(*args)
    raise DecodeError("payload calls something that observations don't use.")


def set_state(node: object, state: object) -> None:
    """Give a record its state, once. Raises: DecodeError."""
    if isinstance(node, Instance) and node.state is None and type(state) is dict:
        node.state = state
    elif isinstance(node, DtypeNode) and node.order is None:
        node.order = _byte_order(state)
    elif isinstance(node, ArrayNode) and node.array is None:
        node.array = _array_of(state)
    else:
        raise DecodeError("payload sets the state of something that takes none.")


def _plain_reconstruct(args: tuple[Any, ...]) -> bool:
    if len(args) != 3 or not isinstance(args[0], Global) or args[0].kind != "ndarray":
        return False
    empty, code = args[1], args[2]
    return type(empty) is tuple and empty == (0,) and code in (b"b", "b")


def _byte_order(state: object) -> str:
    if type(state) is tuple and len(state) == 8:
        version, order, *rest = state
        plain = all(type(value) in (int, type(None)) for value in rest)
        known = version == 3 and order in ("|", "<", ">", "=")
        if known and plain and rest == [None, None, None, -1, -1, 0]:
            return str(order)
    raise DecodeError("dtype of an array must be a plain number type.")


def _array_of(state: object) -> Array:
    if type(state) is tuple and len(state) == 5:
        version, shape, dtype, fortran, data = state
        if version == 1 and isinstance(dtype, DtypeNode) and type(fortran) is bool:
            order = column_major(shape) if fortran else ()
            return make_array(dtype.text, shape, data, order)
    raise DecodeError("state of an array must be version, shape, dtype, order and bytes.")


def _from_buffer(
    data: object, dtype: object, shape: object, order: object, axes: object = None
) -> ArrayNode:
    """Return the array of a protocol 5 pickle; order K: its transpose, ``axes`` of ``shape``."""
    if not isinstance(dtype, DtypeNode):
        raise DecodeError("an array from a buffer must have a dtype.")
    if order == "K" and type(axes) is tuple and type(shape) is tuple and _permutes(axes, shape):
        turned = tuple(shape[axis] for axis in axes)
        inverse = tuple(axes.index(axis) for axis in range(len(axes)))
        return ArrayNode(make_array(dtype.text, turned, data, inverse))
    if order not in ("C", "F") or axes is not None:
        raise DecodeError("an array from a buffer must have order C, F or K.")
    memory = column_major(shape) if order == "F" else ()
    return ArrayNode(make_array(dtype.text, shape, data, memory))


def _permutes(axes: tuple[Any, ...], shape: tuple[Any, ...]) -> bool:
    """Return whether axes are those of the shape in any order."""
    fits = len(axes) == len(shape) <= MAX_RANK and all(type(axis) is int for axis in axes)
    return fits and sorted(axes) == list(range(len(axes)))
