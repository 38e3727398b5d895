"""Values between processes: round trips bit for bit, refusals with their place, hostile bodies."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import inspect
import math
import pathlib
import re
import threading
import types
import typing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing import reductions

from phyai.deployment.value_classes import reference
from phyai.deployment.values import (
    decode,
    encode,
)
from phyai.errors import RequestError
from phyai.types import ActionChunk, Observation, RTCOptions
from tests.core.wire_classes import RAN, MadeByNew, Setter


def there_and_back(value: typing.Any, copy: bool = True) -> typing.Any:
    body, buffers = encode(value)
    return decode(body, [memoryview(bytearray(buffer)) for buffer in buffers], copy=copy)


# ---------------------------------------------------------------- plain data

_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.text(st.characters(categories=["Cs"]))
    | st.binary()
)
_keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.frozensets(st.text())
_values = st.recursive(
    _scalars | st.sets(st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(_keys, inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(_values)
def test_plain_values_come_back_equal_and_of_the_same_types(value: typing.Any) -> None:
    assert _typed(there_and_back(value)) == _typed(value)


def _typed(value: typing.Any) -> typing.Any:
    """Return the types and texts of a value's parts, without the order of its sets."""
    name = type(value).__name__
    if isinstance(value, list | tuple):
        return name, [_typed(part) for part in value]
    if isinstance(value, dict):
        return name, [(_typed(key), _typed(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return name, {_typed(part) for part in value}
    return name, repr(value)


def test_numbers_at_the_edges_and_other_plain_things() -> None:
    huge = 7**40_000
    value = [math.inf, -0.0, 5e-324, huge, -huge, 1 << 63, -(1 << 63), bytearray(b"x"), True, 1]
    assert repr(there_and_back(value[:3])) == repr(value[:3])
    assert there_and_back(value[3:]) == value[3:]
    assert math.isnan(there_and_back(math.nan))
    others = (pathlib.Path("a/b"), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"))
    assert there_and_back(others) == others
    assert type(there_and_back(others)[1]) is torch.Size
    assert there_and_back(np.dtype(">f4")) == np.dtype(">f4")
    assert there_and_back(memoryview(b"abc")[::2]) == b"ac"


def test_any_mapping_arrives_as_a_dict_in_its_order() -> None:
    frozen = types.MappingProxyType({"b": 1, "a": 2})
    given_ = [frozen, collections.OrderedDict(b=1, a=2), collections.defaultdict(int, b=1, a=2)]
    for again in there_and_back(given_):
        assert type(again) is dict
        assert list(again.items()) == [("b", 1), ("a", 2)]


# ---------------------------------------------------------------- arrays

NUMPY = [
    "?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "F", "D",
    ">i4", ">f8", "M8[ns]", "m8[s]", "S5", "U3",
]  # fmt: skip


def _same_array(got: np.ndarray, want: np.ndarray) -> None:
    assert type(got) is np.ndarray
    assert got.dtype == want.dtype
    assert got.dtype.str == want.dtype.str
    assert got.shape == want.shape
    assert got.tobytes() == np.ascontiguousarray(want).tobytes()


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", NUMPY)
def test_numpy_arrays_come_back_bit_for_bit(dtype: str, copy: bool) -> None:
    kind = np.dtype(dtype)
    bits = np.random.default_rng(0).integers(1, 100, 24 * kind.itemsize, dtype=np.uint8)
    flat = (bits % 2 == 0) if dtype == "?" else bits.view(kind)
    flat = flat[:24] if dtype != "g" else np.arange(1, 25, dtype="g")  # not all bits are numbers
    for array in (
        flat.reshape(2, 3, 4),
        flat.reshape(4, 6).T,
        flat[::-2],
        flat[::24],
        flat[3:3],
        flat[:1].reshape(()),
        np.broadcast_to(flat[:2], (3, 2)),
        flat[:0].reshape(0, 5),
    ):
        body, buffers = encode({"x": array})
        own = [memoryview(bytearray(b)) for b in buffers]
        got = decode(body, own, copy=copy)["x"]
        _same_array(got, array)
        assert got.flags.writeable
        if array.size:
            assert copy != np.shares_memory(got, np.frombuffer(own[0], np.uint8))
    scalar = flat[5]
    again = there_and_back(scalar)
    assert type(again) is type(scalar)
    assert again == scalar


# Whole bytes of their own: no quantised dtypes, no packed ones (int4, uint7, ...).
TORCH = sorted(
    {
        dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype)
        and re.fullmatch(r"bool|(u?int|float|bfloat|complex)(8|16|32|64|128)(_\w+)?", name)
    },
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, copy: bool) -> None:
    bits = torch.arange(24 * dtype.itemsize, dtype=torch.uint8)
    flat = (bits % 2 == 0) if dtype == torch.bool else bits.view(dtype)
    for tensor in (
        flat.view(2, 3, 4), flat.view(4, 6).t(), flat[::2], flat[2:2], flat[0], flat[5:9],
        flat[1::24],
    ):  # fmt: skip
        got = there_and_back([tensor], copy=copy)[0]
        assert type(got) is torch.Tensor
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
        assert _octets(got) == _octets(tensor)


def _octets(tensor: torch.Tensor) -> bytes:
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return bytes(fresh.view(-1).view(torch.uint8).tolist())


def test_every_usual_dtype_is_among_those_tested() -> None:
    usual = {torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool}
    assert usual | {torch.uint16, torch.int64, torch.float64} <= set(TORCH)


def test_tensors_with_lazy_signs_and_gradients_arrive_plain() -> None:
    conj = torch.tensor([1 + 2j]).conj()
    assert there_and_back(conj).tolist() == [1 - 2j]
    assert there_and_back(conj.imag).tolist() == [-2.0]
    again = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert type(again) is torch.Tensor
    assert not again.requires_grad


def test_torch_describes_shared_cuda_memory_as_the_codec_expects() -> None:
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert [names[0], names[4]] == ["tensor_cls", "storage_cls"]


def test_a_contiguous_array_is_not_copied_to_encode_it_and_a_copy_is_fresh() -> None:
    image = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    body, buffers = encode([image, torch.from_numpy(image)])
    assert all(np.shares_memory(np.frombuffer(b, np.uint8), image) for b in buffers)
    first, second = decode(body, buffers)
    first += 1
    assert image[0, 0, 0] == 0
    assert int(second[0, 0, 0]) == 0


# ---------------------------------------------------------------- classes


class Colour(enum.Enum):
    RED = "r"


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


class Point(typing.NamedTuple):
    x: int
    y: typing.Any = None


@dataclasses.dataclass
class Watched:
    a: typing.Any
    b: int = 2
    unset: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        RAN.append("post_init")
        self.derived = self.a

    def __setstate__(self, state: object) -> None:
        RAN.append("setstate")

    def __reduce__(self) -> typing.Any:
        RAN.append("reduce")
        return super().__reduce__()

    @functools.cached_property
    def lock(self) -> threading.Lock:
        return threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: typing.Any
    b: tuple[int, ...] = ()


def test_dataclasses_are_filled_without_running_their_code() -> None:
    watched = Watched(a=[1])
    assert isinstance(watched.lock, type(threading.Lock()))  # now it lies in the instance
    RAN.clear()
    again = there_and_back((watched, Frozen(watched.a, (1, 2))))
    assert RAN == []
    assert vars(again[0]) == {"a": [1], "b": 2, "derived": [1]}
    assert again[1] == Frozen([1], (1, 2))


def test_requests_and_results_come_back() -> None:
    image = np.random.default_rng(1).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    rtc = RTCOptions(np.zeros((3, 2), np.float32), inference_delay=2)
    options = {"seed": 7, "rtc": rtc, "deadline": None}
    row = Observation(
        {"front": image}, state=[0.5, 1.0], prompt="gr\u00fc\u00df\n", options=options
    )
    again = there_and_back([row])[0]
    assert type(again) is Observation
    assert again.prompt == row.prompt
    assert again.seed == 7
    _same_array(again.images["front"], image)
    assert again.options["rtc"].inference_delay == 2
    chunk = ActionChunk(np.ones((3, 2), np.float32), ("x", "y"), np.ones(3, bool), image, 20.0)
    got = there_and_back(chunk)
    assert got.names == ("x", "y")
    assert got.horizon == 3
    assert got.control_hz == 20.0


def test_enums_flags_and_named_tuples_come_back() -> None:
    value = [Colour.RED, Level.LOW, Bits.A, Bits.A | Bits.B, Bits(0), Point(1, Point(2, [3]))]
    again = there_and_back(value)
    assert again == value
    assert again[0] is Colour.RED
    assert type(again[1]) is Level
    assert type(again[5].y) is Point


def test_the_main_module_of_a_spawned_process_is_called_main() -> None:
    made = type("Made", (), {"__module__": "__mp_main__"})
    with pytest.raises(TypeError, match=r"not found by its name|main module that is no file"):
        reference(made)
    assert reference(Frozen) == f"{__name__}:Frozen"


# ---------------------------------------------------------------- what does not travel


def _local() -> object:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


class MyList(list[int]):
    pass


def _loop() -> list[object]:
    loop: list[object] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "place", "what"),
    [
        (object(), "request must", "builtins.object"),
        ([{"rtc": Frozen(threading.Lock())}], r"request\[0\]\['rtc'\]\.a must", "_thread.lock"),
        (Observation(options={"rtc": print}), r"request\.options\['rtc'\] must", "function"),
        ({(1, print): 1}, r"request\[key .*\]\[1\] must", "function"),
        (Point(1, print), r"request\[1\] must", "function"),
        (Frozen, "request must", "builtins.type"),
        (_local(), "request must", r"Local whose class is not found"),
        (MyList([1]), "request must", "MyList"),
        (_loop(), r"request\[0\]\[0\]", "nested deeper than 100"),
        (np.array([object()]), "request must", "dtype object"),
        (np.zeros(1, "i4,f4"), "request must", "dtype"),
        (np.ma.masked_array([1]), "request must", "numpy.asarray would lose"),
        (torch.zeros(2).to_sparse(), "request must", "sparse"),
        (torch.zeros(2, device="meta"), "request must", "device meta"),
        (MadeByNew(), "request must", "__new__ of its own"),
        (Setter.__new__(Setter), "request must", "is a property"),
        (torch.Generator(), "request must", "Generator"),
        (range(3), "request must", "range"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(value: object, place: str, what: str) -> None:
    with pytest.raises(RequestError, match=f"{place}.*{what}"):
        encode(value)


def test_the_caller_names_the_root() -> None:
    with pytest.raises(RequestError, match=r"result\[0\] must"):
        encode([print], where="result")
