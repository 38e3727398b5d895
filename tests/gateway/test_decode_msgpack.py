"""msgpack and .npy readers: three array forms, limits before memory, mutated recordings."""

from __future__ import annotations

import io
import struct
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_gateway.decode import numpy_msgpack as codec
from phyai_gateway.decode.arrays import Array, make_array, pack_float32, parse_dtype
from phyai_gateway.decode.limits import MIB, DecodeError
from phyai_gateway.decode.npy import read_npy, write_npy

GOLDEN = Path(__file__).parents[1] / "golden/serving"
SEEDS = [
    p.read_bytes() for f in ("openpi", "groot") for p in sorted((GOLDEN / f).glob("*.msgpack"))
]
DTYPES = ["|u1", "|i1", "<u2", "<i4", "<i8", "<f2", "<f4", "<f8", ">f4", ">f8", ">i2"]


def numpy_of(array: Array) -> np.ndarray[Any, Any]:
    dtype = array.dtype.replace(">", "<")
    return np.frombuffer(array.row_major(), dtype).reshape(array.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (4, 1, 5), (2, 3, 4, 5), (0, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_is_what_numpy_reads_and_writes(dtype: str, shape: tuple[int, ...], order: str) -> None:
    count = int(np.prod(shape))
    array = np.asarray(np.arange(count).reshape(shape), dtype=dtype, order=order)  # type: ignore[call-overload]
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    found = read_npy(file.getvalue())
    assert np.array_equal(numpy_of(found), array)
    assert np.array_equal(np.load(io.BytesIO(write_npy(found))), array)
    if order == "C" and dtype[0] != ">":
        assert write_npy(found) == file.getvalue()


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_npy_versions(version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(3.0), version)
    assert numpy_of(read_npy(file.getvalue())).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_column_major_images_of_any_item_size(dtype: str) -> None:
    array = np.asfortranarray(np.arange(60).reshape(3, 4, 5).astype(dtype))
    found = make_array(dtype, array.shape, array.tobytes(order="F"), (2, 1, 0))
    assert np.array_equal(numpy_of(found), array)


def test_column_major_array_of_many_lines_is_refused() -> None:
    found = make_array("|u1", (400, 400, 400), bytes(400**3), (2, 1, 0))
    with pytest.raises(DecodeError, match="row-major"):
        found.row_major()


@pytest.mark.parametrize(
    ("read", "write"),
    [
        (codec.openpi_hook, codec.pack_openpi),
        (codec.GrootHook(), codec.pack_npy_form),
        (codec.GrootHook(), codec.pack_nd_form),
    ],
)
def test_forms_round_trip(read: Any, write: Any) -> None:
    value = {"a": make_array("<f4", (1, 2), struct.pack("<2f", 1, 2)), "b": [1, None, "x", 0.5]}
    found = codec.unpack(write(value), read)
    assert found["b"] == [1, None, "x", 0.5]
    assert numpy_of(found["a"]).tolist() == [[1.0, 2.0]]


def test_openpi_writes_bytes_keys_and_reads_both() -> None:
    array = make_array("|u1", (2,), b"ab")
    raw = msgpack.unpackb(codec.pack_openpi(array), strict_map_key=False)
    assert raw == {b"__ndarray__": True, b"data": b"ab", b"dtype": "|u1", b"shape": [2]}
    text_keys = {key.decode(): value for key, value in raw.items()}
    assert codec.unpack(msgpack.packb(text_keys), codec.openpi_hook).shape == (2,)


@pytest.mark.parametrize("text", ["O", "|V8", "<c16", "<U4", "<M8[s]", "f4,f4", "<f16", "", "=f4"])
def test_dtypes_that_are_not_plain_numbers(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_dtype(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
def test_float32_must_be_finite(value: float) -> None:
    with pytest.raises(DecodeError):
        pack_float32([0.0, value], "state")


@pytest.mark.parametrize(
    "payload",
    [
        msgpack.packb([[0] * 4000] * 4),  # more values than one message may have
        msgpack.packb(["x" * 60_000] * 20),  # texts widen when they are read
        msgpack.packb({1: 2}, strict_types=True),
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"\x92\x00",
        b"\x00\x00",
        b"\xd9\x02\xff\xfe",
    ],
)
def test_structures_beyond_the_limits(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        codec.unpack(payload, codec.openpi_hook)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_mutated_recordings_never_crash_import_or_grow(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, max(len(payload) - 1, 0)))
        # Headers sit at the front of each part; bytes deep inside an image change nothing.
        at = min(at, 300) if data.draw(st.booleans()) else at
        if data.draw(st.booleans()) and payload:
            payload[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        else:
            payload[at : at + data.draw(st.integers(0, 20))] = data.draw(st.binary(max_size=8))
    check_harmless(bytes(payload))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=120))
def test_random_bytes_never_crash_import_or_grow(payload: bytes) -> None:
    check_harmless(payload)


def check_harmless(payload: bytes) -> None:
    before = set(sys.modules)
    for hook in (codec.openpi_hook, codec.GrootHook()):
        told = ""
        tracemalloc.start()
        try:
            codec.unpack(payload, hook)
        except DecodeError as error:
            told = error.message
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert len(told) < 300
        assert peak < 3 * len(payload) + MIB
    assert set(sys.modules) == before


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=150))
def test_npy_reader_on_mutated_headers(tail: bytes) -> None:
    for head in (b"", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', "):
        with suppress(DecodeError):
            read_npy(head + tail)
