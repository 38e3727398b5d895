"""The pickle reader: genuine objects as real unpickling gives them, everything else refused."""

from __future__ import annotations

import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai_gateway.decode.limits import MAX_PICKLE_OPS, MIB, DecodeError
from phyai_gateway.decode.pickle_nodes import ArrayNode, Instance
from phyai_gateway.decode.pickle_reader import read_pickle
from phyai_gateway.decode.pickle_writer import write_timed_actions
from tests.gateway import lerobot_robot as robot

GOLDEN = Path(__file__).parents[1] / "golden/serving"
SEEDS = [p.read_bytes() for p in sorted(GOLDEN.glob("lerobot*/*.pkl")) if p.stat().st_size < 20_000]
DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "i8", "f2", "f4", "f8", "?", ">f4", ">i8"]


def array_of(node: Any) -> np.ndarray[Any, Any]:
    assert isinstance(node, ArrayNode)
    assert node.array is not None
    dtype = node.array.dtype.replace(">", "<").replace("b1", "?")
    return np.frombuffer(node.array.row_major(), dtype).reshape(node.array.shape)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_array_is_what_unpickling_gives(protocol: int, dtype: str, order: str) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)  # type: ignore[call-overload]
    assert np.array_equal(array_of(read_pickle(pickle.dumps(array, protocol))), array)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_views_and_scalars_are_what_unpickling_gives(protocol: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    turned = [image.transpose(axes) for axes in ((1, 0, 2), (1, 2, 0), (2, 0, 1))]
    for view in (image[::2, ::3], image[..., :1], np.rot90(image), *turned):
        assert np.array_equal(array_of(read_pickle(pickle.dumps(view, protocol))), view)
    assert read_pickle(pickle.dumps(np.float32(1.5), protocol)).value == 1.5


def test_bytes_of_an_image_are_not_copied() -> None:
    image = np.zeros((200, 200, 3), np.uint8)
    payload = robot.observation(found={"front": image})
    node = read_pickle(payload).state["observation"]["front"]
    assert node.array.data.obj is payload


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(plain, st.integers(2, 5))
def test_plain_values_are_what_unpickling_gives(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_mutated_recordings_never_crash_import_or_grow(data: st.DataObject) -> None:
    payload = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(len(payload) - 1, 0)))
        kind = data.draw(st.sampled_from(["set", "cut", "insert", "repeat"]))
        if kind == "set" and payload:
            payload[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del payload[at : at + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            payload[at:at] = data.draw(st.binary(max_size=12))
        else:
            payload[at:at] = payload[at : at + 30]
    check_harmless(bytes(payload))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_opcodes_never_crash_import_or_grow(tail: bytes) -> None:
    check_harmless(b"\x80\x04" + tail)


def check_harmless(payload: bytes) -> None:
    before = set(sys.modules)
    tracemalloc.start()
    told = ""
    try:
        read_pickle(payload)
    except DecodeError as error:
        told = error.message
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(told) < 300
    assert peak < 3 * len(payload) + MIB
    assert set(sys.modules) == before


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80\x04" + b"]" * (MAX_PICKLE_OPS + 2),
        b"\x80\x04" + b"(" * 5000 + b".",
        b"\x80\x04]" + b"(" + b"}" * 4000 + b"e" + b"(" + b"}" * 4000 + b"e" + b"0" * 4000,
        b"\x80\x04N" + b"r\xff\xff\xff\x7f" + b".",
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b".",
        b"\x80\x04(]]s.",  # a list as a key
        b"\x80\x04}]]s.",
        b"\x80\x04}(K\x01K\x02u.",
        b"\x80\x04(b.",
        b"\x80\x04]N(a.",
        b"\x80\x06N.",
        b"\x80\x04N\x80\x04.",
    ],
)
def test_wrong_structures_are_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        read_pickle(payload)


def test_repeated_array_bytes_are_refused() -> None:
    """One long text, encoded again and again, would multiply its bytes."""
    text = b"X" + (70_000).to_bytes(4, "little") + b"a" * 70_000 + b"q\x00"
    encode = b"c_codecs\nencode\nq\x01X\x06\x00\x00\x00latin1q\x02"
    again = b"h\x01h\x00h\x02\x86R"
    with pytest.raises(DecodeError, match="repeats"):
        read_pickle(b"\x80\x02(" + text + encode + again * 200 + b"t.")
    wide = b"X" + (70_003).to_bytes(4, "little") + b"a" * 70_000 + "\u20ac".encode() + b"q\x00"
    with pytest.raises(DecodeError, match="latin-1"):
        read_pickle(b"\x80\x02(" + wide + encode + again + b"t.")


def test_reply_is_what_the_client_reads() -> None:
    rows = np.random.default_rng(1).normal(size=(50, 7)).astype(np.float32)
    data = write_timed_actions(rows.tolist(), 1790000000.25, 2**31 - 3, 30.0)
    assert len(data) < 6500
    found = robot.read_actions(b"\x0a" + robot.varint(len(data)) + data)
    assert np.array_equal(np.stack([a.action for a in found]), rows)
    assert [a.timestep for a in found] == list(range(2**31 - 3, 2**31 + 47))
    assert [a.timestamp for a in found] == [1790000000.25 + i / 30 for i in range(50)]


def test_classes_are_named_never_found() -> None:
    found = read_pickle(robot.observation())
    assert isinstance(found, Instance)
    assert found.name == "TimedObservation"
    assert "lerobot" not in sys.modules
