"""Errors between processes, and bodies that no encoder made."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai.deployment.values import (
    WireError,
    WorkerTraceback,
    decode,
    decode_error,
    encode,
    encode_error,
)
from phyai.errors import ConfigError, EngineUnavailableError, SessionEvicted
from tests.core.wire_classes import RAN, MadeByNew, NewOfItsOwn, Setter

# ---------------------------------------------------------------- errors


class Moody(RuntimeError):
    """Takes other arguments than it passes on, and keeps some that cannot travel."""

    def __init__(self, code: int, lock: object) -> None:
        RAN.append("moody")
        super().__init__(f"code {code}")
        self.code, self.lock = code, lock

    def __str__(self) -> str:
        return f"moody: {self.args[0]} {self.code}"


class Broken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _error(error: BaseException) -> Exception:
    body, buffers = encode_error(error)
    return decode_error(body, buffers)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("x must be y; got z."),
        SessionEvicted("gone"),
        KeyError("name"),
        FileNotFoundError(2, "No such file", "a.txt"),
        OSError(18, "Cross-device", "a", None, "b"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"),
        StopIteration(3),
        MemoryError(),
        ValueError(np.arange(3), {"a": torch.ones(2)}),
        torch.OutOfMemoryError("CUDA out of memory"),
        json.JSONDecodeError("bad", "doc", 1),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_keep_type_and_text(error: Exception) -> None:
    again = _error(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert repr(again.args) == repr(error.args)


def test_errors_keep_their_attributes_and_traceback_text() -> None:
    try:
        try:
            [][1]
        except IndexError as cause:
            raise EngineUnavailableError("closed for today", reason="closed") from cause
    except EngineUnavailableError as error:
        error.add_note("a note")
        again = _error(error)
    assert isinstance(again, EngineUnavailableError)
    assert again.reason == "closed"
    assert again.__notes__ == ["a note"]
    assert isinstance(again.__cause__, WorkerTraceback)
    text = str(again.__cause__)
    assert "IndexError" in text
    assert "test_deployment_errors.py" in text


def test_an_error_class_never_runs_its_code_and_loses_only_what_cannot_travel() -> None:
    error = Moody(3, threading.Lock())
    RAN.clear()
    again = _error(error)
    assert RAN == []
    assert type(again) is Moody
    assert again.code == 3
    assert str(again) == "moody: code 3 3"
    assert not hasattr(again, "lock")
    several = _error(ExceptionGroup("two", [KeyError("a"), ValueError("b")]))
    assert isinstance(several, ExceptionGroup)
    assert [type(e) for e in several.exceptions] == [KeyError, ValueError]
    assert str(_error(ValueError(threading.Lock()))).startswith("<unlocked _thread.lock")


def test_errors_that_cannot_be_rebuilt_are_runtime_errors_that_name_them() -> None:
    class Hidden(Exception):
        pass

    again = _error(Hidden("oh"))
    assert type(again) is RuntimeError
    assert "Hidden: oh" in str(again)
    again = _error(Broken())
    assert type(again) is RuntimeError
    assert "Broken" in str(again)
    assert type(_error(SystemExit(3))) is RuntimeError
    assert "SystemExit: 3" in str(_error(SystemExit(3)))
    body, _ = encode_error(ConfigError("text"))
    for name in ("no.such.module:X", "phyai.errors:Nope", "builtins:print", "builtins:int"):
        other = body.replace(b"phyai.errors:ConfigError", name.encode())
        assert str(decode_error(other)) == "phyai.errors.ConfigError: text"
    with pytest.raises(WireError, match="arrive as one"):
        decode_error(*encode([1]))


# ---------------------------------------------------------------- hostile bodies

HOSTILE = [
    b"", b"\xff", b"[", b"{}", b'{"a": 1}', b'["?"]', b"[]", b"[[]]", b"[1]", b'["l", {}]',
    b'["i", "zz"]', b'["i", 3]', b'["u0"]', b'["d", 1]', b'["d", ["l"], 1]', b'["s", ["l"]]',
    b'["b", 0]', b'["b", -1]', b'["b", "0"]', b'["a", "O", [], 0]', b'["y", "O"]',
    b'["k", "load"]', b'["k", "nn"]', b'["v", "nowhere"]', b'["z", "a"]', b'["c", "a", 1]',
    b'["o", "subprocess:Popen", "args", "true"]', b'["o", "os:system"]', b'["o", "os.path:join"]',
    b'["o", "builtins:object"]', b'["o", 3]', b'["o"]', b'["o", "no.such.module:X"]',
    b'["o", "phyai.types:Observation", "nope", 1]', b'["o", "phyai.types:Observation.seed"]',
    b'["n", "builtins:tuple", 1]', b'["n", "builtins:int", 1]', b'["e", "builtins:int", "real"]',
    b'["E", "builtins:int"]', b'["e", "enum:Enum", "mro"]', b'["x"]', b"[" * 5000 + b"]" * 5000,
    b'["G", 1]', b"9" * 5000, b'["p", 3]',
]  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE, ids=lambda b: b[:40].decode("latin-1"))
def test_bodies_that_encode_did_not_make_are_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="that encode"):
        decode(body)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("t", [3]), ("t", [-1]), ("t", [1 << 62, 0, 1 << 62]), ("t", [2.0]), ("t", [True, 8]),
     ("a", [3]), ("a", [-1]), ("a", "ab"), ("a", [2, "2"]), ("t", None), ("a", [1 << 70])],
)  # fmt: skip
def test_shapes_that_do_not_fit_their_bytes_are_refused(kind: str, shape: object) -> None:
    dtype = {"t": "float32", "a": "<f4"}[kind]
    body = json.dumps([kind, dtype, shape, 0]).encode()
    with pytest.raises(WireError):
        decode(body, [memoryview(bytearray(8))])


def test_classes_with_a_constructor_of_their_own_are_refused() -> None:
    RAN.clear()
    for cls in (MadeByNew, Setter, NewOfItsOwn):
        name = f"{cls.__module__}:{cls.__qualname__}"
        with pytest.raises(WireError):
            decode(json.dumps(["o", name, "a", 2]).encode())
    assert RAN == []


_trees = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 65) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4).map(list)
        | st.tuples(st.sampled_from("ludsficbBpagtGykvzoneEx"), inner, inner, inner).map(list)
    ),
    max_leaves=8,
)


@settings(max_examples=40, deadline=None)
@given(_trees, st.lists(st.binary(max_size=8), max_size=3))
def test_made_up_trees_decode_or_are_refused(tree: object, buffers: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        decode(json.dumps(tree).encode(), [memoryview(bytearray(b)) for b in buffers])
