"""Blocks and messages of a pool's channel: bounds, and what of the other side is refused."""

from __future__ import annotations

import contextlib
import os
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phyai.deployment import messages
from phyai.deployment.blocks import SMALLEST, Block, BlockPool, open_block
from phyai.deployment.channel import Channel, ChannelClosed
from phyai.deployment.values import WireError
from tests.core.channel_ends import got, open_files, some_bytes

# ---------------------------------------------------------------- blocks


def test_the_pool_of_blocks_is_bounded_and_keeps_classes_apart() -> None:
    before = open_files()
    pool = BlockPool(max_free=2, max_free_bytes=6 * SMALLEST)
    blocks = [pool.take(size) for size in (1, SMALLEST, SMALLEST + 1, 5 * SMALLEST, 5)]
    assert [block.size // SMALLEST for block in blocks] == [1, 1, 2, 8, 1]
    assert pool.give(blocks[3]) == [blocks[3].id]  # larger than all that may be kept
    assert pool.give(blocks[0]) == []
    assert pool.give(blocks[1]) == []
    assert pool.give(blocks[4]) == [blocks[0].id]  # the third of its class
    assert pool.give(blocks[2]) == []
    assert pool.free_bytes == 4 * SMALLEST
    assert pool.take(10) is blocks[4]
    pool.close()
    assert pool.free_bytes == 0
    assert pool.give(blocks[4]) == [blocks[4].id]
    assert open_files() == before


def test_only_a_sealed_block_of_the_right_size_is_mapped() -> None:
    block = Block(1, SMALLEST)
    fd = block.take_fd()
    open_block(fd, SMALLEST).close()
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(loose, SMALLEST)
    read, write = os.pipe()
    for bad, size in ((fd, SMALLEST * 2), (fd, 0), (loose, SMALLEST), (read, SMALLEST)):
        with pytest.raises(ValueError, match="block"):
            open_block(bad, size)
    for one in (fd, loose, read, write):
        os.close(one)
    block.close()


# ---------------------------------------------------------------- bad messages


def _frame(flags: int, call_id: int, block_id: int, size: int, num_fds: int = 0) -> bytes:
    plan = messages.plan("done", call_id, b"", [], flags)
    return plan.head(0, num_fds, block_id, size) + b"".join(plan.small)


R, B, N, S = messages.REPLY, messages.BLOCK, messages.NEW, messages.SPILLED
GARBAGE = [
    b"x", b"PhY1", b"GET / HTTP/1.1\r\n" * 10, b"\0" * 4000, _frame(B, 1, 5, 65536),
    _frame(R | B, 1, 5, 65536), _frame(B, 0, 0, 65536), _frame(S, 0, 0, 0), _frame(B | N, 0, 1, 9),
    _frame(0, 1, 0, 0, 3), _frame(0, 1, 0, 0) + b"more", _frame(0, 1, 0, 0)[:-1],
    b"x" * (messages.MAX_MESSAGE + 1),
]  # fmt: skip


@pytest.mark.parametrize("data", GARBAGE, ids=lambda d: d[:12].hex())
@pytest.mark.parametrize("role", ["parent", "worker"])
def test_bytes_that_are_no_message_are_refused_and_leak_no_descriptor(
    data: bytes, role: str
) -> None:
    before = open_files()
    raw, ours = Channel.pair()
    channel = Channel(ours, role)  # type: ignore[arg-type]
    for fds in ([], [0], [0] * 20, [0] * 60):
        if fds:
            socket.send_fds(raw, [data], fds)
        else:
            raw.send(data)
        with pytest.raises(WireError, match="A message must be one that send"):
            channel.receive()
        assert open_files() == before + 2
    raw.send(_frame(0, 7, 0, 0))  # the next genuine one still arrives
    assert got(channel).call_id == 7
    raw.close()
    channel.close()
    assert open_files() == before


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_genuine_message_with_wrong_bytes_is_refused_or_read(data: st.DataObject) -> None:
    plan = messages.plan("step", 3, b"body", [some_bytes(9), some_bytes(30)], 0)
    frame = bytearray(plan.head(0, 0, 0, 0) + b"".join(plan.small))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    raw, ours = Channel.pair()
    worker = Channel(ours, "worker")
    with raw, contextlib.closing(worker):
        raw.send(frame[: data.draw(st.integers(1, len(frame)))])
        raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(WireError, ChannelClosed):
            worker.receive()


def test_a_worker_cannot_answer_in_a_block_that_its_call_has_not() -> None:
    before = open_files()
    here, raw = Channel.pair()
    parent = Channel(here, "parent")
    parent.send("step", 1, b"", [some_bytes(20_000)])
    parent.send("step", 2, b"", [some_bytes(20_000)])
    for call, block, size in ((3, 1, 65536), (1, 2, 65536), (2, 2, 4096)):
        raw.send(_frame(R | B, call, block, size))
        with pytest.raises(WireError):
            parent.receive()
    head = messages.plan("x", 9, b"", [some_bytes(20_000)], B)
    raw.send(head.head(0, 0, 0, 0) + b"".join(head.small))
    with pytest.raises(WireError):
        parent.receive()
    parent.close()
    raw.close()
    assert open_files() == before


def test_a_buffer_outside_its_block_is_refused() -> None:
    here, raw = Channel.pair()
    with raw, contextlib.closing(Channel(here, "worker")) as worker:
        for size in (SMALLEST + 1, 1 << 62):
            block = Block(0, SMALLEST)
            plan = messages.plan("x", 0, b"", [], B | N)
            plan.count, plan.small = 1, [b"x", np.array([0, size], "<u8").tobytes()]
            data = plan.head(0, 0, 0, SMALLEST) + b"".join(plan.small)
            socket.send_fds(raw, [data], [block.fd])
            with pytest.raises(WireError, match="outside its message"):
                worker.receive()
            block.close()
