"""Read LeRobot's pickles without executing, importing or resolving anything.

A small interpreter of the opcodes that genuine clients write. What would be an object becomes an
inert record (``pickle_nodes``); bytes stay views of what was received; every other opcode, name or
form is refused. Costs are bounded by the caps of ``limits`` and by the payload's own length.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from phyai_gateway.decode import pickle_nodes as nodes
from phyai_gateway.decode.limits import (
    MAX_PICKLE_MARKS,
    MAX_PICKLE_MEMO,
    MAX_PICKLE_OPS,
    MAX_PICKLE_STACK,
    MAX_TEXT_BYTES,
    MAX_TEXTS_BYTES,
    DecodeError,
)

_CHUNK = 1 << 20
_U1, _U2, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_I4, _F8 = struct.Struct("<i"), struct.Struct(">d")


def read_pickle(payload: bytes | bytearray | memoryview) -> Any:
    """Return the one object of a pickle: plain values, or records of ``pickle_nodes``.

    Raises: DecodeError.

    >>> read_pickle(b"\\x80\\x04\\x8c\\x01a\\x85.")
    ('a',)
    """
    return _Reader(memoryview(payload)).run()


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.encoded_bytes = self.text_bytes = 0

    def run(self) -> Any:
        if not self.data or self.data[0] != 0x80:
            raise DecodeError("payload must be a pickle of protocol 2 or later; got other bytes.")
        data, stack, memo, end = self.data, self.stack, self.memo, len(self.data)
        for _ in range(MAX_PICKLE_OPS):
            if self.at >= end:
                raise DecodeError("payload ends early.")
            opcode = data[self.at]
            self.at += 1
            if opcode == 0x94 and stack and len(memo) < MAX_PICKLE_MEMO:  # MEMOIZE: a third of all
                memo[len(memo)] = stack[-1]
                continue
            if opcode == 0x2E:  # STOP
                return self._result()
            handler = _HANDLERS.get(opcode)
            if handler is None:
                raise DecodeError("payload has a refused opcode.")
            handler(self)
            if len(stack) > MAX_PICKLE_STACK:  # the memo has a cap of its own
                raise DecodeError("payload needs more memory than observations do.")
        raise DecodeError(f"payload has more than {MAX_PICKLE_OPS} opcodes.")

    def _result(self) -> Any:
        if self.at != len(self.data) or len(self.stack) != 1 or self.marks:
            raise DecodeError("payload must hold one object and nothing after it.")
        return self.stack[0]

    # ------------------------------------------------------------ reading

    def take(self, count: int) -> memoryview:
        """Return the next bytes; the length is checked before anything is done with them."""
        if count < 0 or count > len(self.data) - self.at:
            raise DecodeError("payload declares more bytes than it has.")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: struct.Struct) -> Any:
        at = self.at
        self.at += form.size
        if self.at > len(self.data):
            raise DecodeError("payload declares more bytes than it has.")
        return form.unpack_from(self.data, at)[0]

    def line(self) -> str:
        rest = self.data[self.at : self.at + 256].tobytes()
        end = rest.find(b"\n")
        if end < 0:
            raise DecodeError("payload has an unfinished name.")
        return _decoded(self.take(end + 1)[:-1])

    # ------------------------------------------------------------ stack

    def push(self, value: object) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if not self.stack or (self.marks and self.marks[-1] >= len(self.stack)):
            raise DecodeError("payload takes from an empty stack.")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        floor = self.marks[-1] if self.marks else 0
        if len(self.stack) <= floor or type(self.stack[-1]) is not kind:
            raise DecodeError("payload adds to something that isn't a list or a map.")
        return self.stack[-1]

    def marked(self) -> list[Any]:
        if not self.marks:
            raise DecodeError("payload closes a group that it never opened.")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    # ------------------------------------------------------------ opcodes

    def proto(self) -> None:
        if self.at != 1 or not 2 <= self.number(_U1) <= 5:
            raise DecodeError("payload must be a pickle of protocol 2 to 5.")

    def frame(self) -> None:
        length = self.number(_U8)
        if length > len(self.data) - self.at:
            raise DecodeError("payload declares a frame that is longer than itself.")

    def mark(self) -> None:
        if len(self.marks) >= MAX_PICKLE_MARKS:
            raise DecodeError("payload nests too deeply.")
        self.marks.append(len(self.stack))

    def text(self, length: int) -> None:
        data = self.take(length)
        self.text_bytes += length if length <= MAX_TEXT_BYTES else 0
        if self.text_bytes > MAX_TEXTS_BYTES:
            raise DecodeError(f"all texts together must have at most {MAX_TEXTS_BYTES} bytes.")
        self.push(nodes.LongText(data) if length > MAX_TEXT_BYTES else _decoded(data))

    def short_text(self) -> None:
        """A name or a task; these and the three below are most of what there is to read."""
        data, at = self.data, self.at
        end = at + 1 + data[at] if at < len(data) else at + 1
        if end > len(data):
            raise DecodeError("payload declares more bytes than it has.")
        self.at = end
        self.text_bytes += end - at - 1
        if self.text_bytes > MAX_TEXTS_BYTES:
            raise DecodeError(f"all texts together must have at most {MAX_TEXTS_BYTES} bytes.")
        self.stack.append(_decoded(data[at + 1 : end]))

    def short_recall(self) -> None:
        self.recall(self.number(_U1))

    def short_integer(self) -> None:
        self.stack.append(self.number(_U1))

    def float_(self) -> None:
        self.stack.append(self.number(_F8))

    def bytes_(self, length: int) -> None:
        self.push(self.take(length))

    def long1(self) -> None:
        length = self.number(_U1)
        if length > 16:
            raise DecodeError("payload has an integer of more than 16 bytes.")
        self.push(int.from_bytes(self.take(length), "little", signed=True))

    def remember(self, index: int) -> None:
        if not self.stack or index >= MAX_PICKLE_MEMO:
            raise DecodeError("payload remembers more than observations do.")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            raise DecodeError("payload recalls what it never stored.")
        self.push(self.memo[index])

    def tuple_(self, count: int) -> None:
        stack = self.stack
        if len(stack) - count < (self.marks[-1] if self.marks else 0):
            raise DecodeError("payload takes from an empty stack.")
        values = tuple(stack[-count:])
        del stack[-count:]
        stack.append(values)

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def appends(self) -> None:
        values = self.marked()
        self.top(list).extend(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_pairs([key, value])

    def set_items(self) -> None:
        self.set_pairs(self.marked())

    def set_pairs(self, values: list[Any]) -> None:
        target = self.top(dict)
        if len(values) % 2 or not all(type(key) is str for key in values[::2]):
            raise DecodeError("keys of a map must be text.")
        target.update(zip(values[::2], values[1::2], strict=True))

    def global_(self) -> None:
        module = self.line()
        self.push(nodes.find_global(module, self.line()))

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.push(nodes.find_global(module, name))

    def new_object(self) -> None:
        args, cls = self.pop(), self.pop()
        self.push(nodes.new_instance(cls, args))

    def reduce(self) -> None:
        args, function = self.pop(), self.pop()
        if isinstance(function, nodes.Global) and function.kind == "encode":
            self.push(self.encode(args))
        else:
            self.push(nodes.apply(function, args))

    def build(self) -> None:
        state, node = self.pop(), self.pop()
        nodes.set_state(node, state)
        self.push(node)

    def encode(self, args: object) -> bytearray:
        """Return latin-1 bytes of a text; all of them together are no longer than the payload."""
        if type(args) is not tuple or len(args) != 2 or args[1] not in ("latin1", "latin-1"):
            raise DecodeError("payload encodes bytes in a way that observations don't use.")
        text = args[0]
        if not isinstance(text, str | nodes.LongText):
            raise DecodeError("payload encodes something that isn't text.")
        self.encoded_bytes += len(text) if isinstance(text, str) else len(text.data)
        if self.encoded_bytes > len(self.data):
            raise DecodeError("payload repeats array bytes.")
        return _latin1(text.encode() if isinstance(text, str) else text.data)


def _decoded(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise DecodeError("text of the payload must be UTF-8.") from error


def _latin1(data: bytes | memoryview) -> bytearray:
    """Return latin-1 bytes piece by piece: one wide character must not widen all of them."""
    out, at = bytearray(), 0
    try:
        while at < len(data):
            end = min(at + _CHUNK, len(data))
            for _ in range(3):  # never inside a character, which has at most 3 such bytes
                if end < len(data) and data[end] & 0xC0 == 0x80:
                    end -= 1
            out += str(data[at:end], "utf-8").encode("latin-1")
            at = end
    except UnicodeError as error:
        raise DecodeError("array bytes of the payload must be latin-1 text.") from error
    return out


_HANDLERS: dict[int, Callable[[_Reader], None]] = {
    0x80: _Reader.proto,
    0x95: _Reader.frame,
    0x94: lambda r: r.remember(len(r.memo)),  # where run() refuses it
    ord("q"): lambda r: r.remember(r.number(_U1)),
    ord("r"): lambda r: r.remember(r.number(_U4)),
    ord("h"): _Reader.short_recall,
    ord("j"): lambda r: r.recall(r.number(_U4)),
    0x8C: _Reader.short_text,
    ord("X"): lambda r: r.text(r.number(_U4)),
    ord("C"): lambda r: r.bytes_(r.number(_U1)),
    ord("B"): lambda r: r.bytes_(r.number(_U4)),
    0x8E: lambda r: r.bytes_(r.number(_U8)),
    0x96: lambda r: r.bytes_(r.number(_U8)),
    ord("N"): lambda r: r.push(None),
    0x88: lambda r: r.push(True),
    0x89: lambda r: r.push(False),
    ord("J"): lambda r: r.push(r.number(_I4)),
    ord("K"): _Reader.short_integer,
    ord("M"): lambda r: r.push(r.number(_U2)),
    0x8A: _Reader.long1,
    ord("G"): _Reader.float_,
    ord(")"): lambda r: r.push(()),
    ord("]"): lambda r: r.push([]),
    ord("}"): lambda r: r.push({}),
    ord("("): _Reader.mark,
    ord("t"): lambda r: r.push(tuple(r.marked())),
    0x85: lambda r: r.tuple_(1),
    0x86: lambda r: r.tuple_(2),
    0x87: lambda r: r.tuple_(3),
    ord("a"): _Reader.append,
    ord("e"): _Reader.appends,
    ord("s"): _Reader.set_item,
    ord("u"): _Reader.set_items,
    ord("c"): _Reader.global_,
    0x93: _Reader.stack_global,
    0x81: _Reader.new_object,
    ord("R"): _Reader.reduce,
    ord("b"): _Reader.build,
}
