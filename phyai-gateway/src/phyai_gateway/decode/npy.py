"""Read and write ``.npy`` files as Isaac-GR00T's clients embed them, without numpy.

The header must have the one form that numpy writes for plain number types; it is matched, never
evaluated.
"""

from __future__ import annotations

import re
import struct

from phyai_gateway.decode.arrays import Array, column_major, make_array
from phyai_gateway.decode.limits import MAX_NPY_HEADER_BYTES, DecodeError

_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([<>|]?[a-z][0-9])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,10}, ?){0,7}(?:[0-9]{1,10})?)\), ?\}[ ]*\n?"
)


def read_npy(data: bytes | bytearray | memoryview) -> Array:
    """Return the array of a ``.npy`` file of version 1 to 3, over its bytes.

    Raises: DecodeError for any other file, dtype or length.
    """
    view = memoryview(data)
    if view[:6].tobytes() != _MAGIC or len(view) < 10:
        raise DecodeError("array must be a .npy file; got other bytes.")
    version = view[6:8].tobytes()
    if version not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise DecodeError("array must be a .npy file of version 1, 2 or 3.")
    form = "<H" if version[0] == 1 else "<I"
    start = 8 + struct.calcsize(form)
    if len(view) < start:
        raise DecodeError("header of the .npy file is cut off.")
    (length,) = struct.unpack(form, view[8:start])
    if length > MAX_NPY_HEADER_BYTES or start + length > len(view):
        raise DecodeError(
            f"header of the .npy file must have at most {MAX_NPY_HEADER_BYTES} bytes."
        )
    found = _HEADER.fullmatch(view[start : start + length].tobytes())
    if found is None:
        raise DecodeError("header of the .npy file must describe one array of plain numbers.")
    shape = tuple(int(size) for size in found[3].split(b",") if size.strip())
    dtype = found[1].decode()
    order = column_major(shape) if found[2] == b"True" else ()
    return make_array(dtype, shape, view[start + length :], order)


def write_npy(array: Array) -> bytes:
    """Return the array as a ``.npy`` file of version 1, in row-major order.

    >>> from phyai_gateway.decode.arrays import make_array
    >>> read_npy(write_npy(make_array("<f4", (1, 2), bytes(8)))).shape
    (1, 2)
    """
    dtype = array.dtype.replace(">", "<")
    sizes = "".join(f"{size}, " for size in array.shape).rstrip()
    shape = sizes if len(array.shape) == 1 else sizes.rstrip(",")
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({shape}), }}".encode()
    head += b" " * (-(10 + len(head) + 1) % 64) + b"\n"
    return _MAGIC + b"\x01\x00" + struct.pack("<H", len(head)) + head + bytes(array.row_major())
