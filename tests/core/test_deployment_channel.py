"""The channel of a pool: order, lent memory, full sockets, dead peers, no leaks."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phyai.deployment.blocks import SMALLEST
from phyai.deployment.channel import Channel, ChannelClosed
from phyai.deployment.values import decode, encode, encode_error
from phyai.errors import ConfigError
from tests.core.channel_ends import got, open_files, some_bytes


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    """A parent's and a worker's end in one process, and a check that nothing stays open."""
    before = open_files()
    here, there = Channel.pair()
    parent, worker = Channel(here, "parent"), Channel(there, "worker")
    yield parent, worker
    parent.close()
    worker.close()
    assert open_files() == before


def test_small_messages_keep_their_order_and_use_no_shared_memory(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    assert parent.receive() is None
    assert parent.send("step", 1, b"body", [some_bytes(3), memoryview(b""), some_bytes(5, 1)])
    assert parent.send("stats")
    first, second = got(worker), got(worker)
    assert (first.kind, first.call_id, first.body, first.reply) == ("step", 1, b"body", False)
    assert [bytes(b) for b in first.buffers] == [bytes(some_bytes(3)), b"", bytes(some_bytes(5, 1))]
    assert (second.kind, second.call_id, second.body, second.buffers) == ("stats", 0, b"", [])
    assert worker.send("done", 1, b"x", reply=True)
    answer = got(parent)
    assert (answer.kind, answer.call_id, answer.reply) == ("done", 1, True)
    assert parent._blocks.free_bytes == 0


def test_a_large_request_and_its_result_share_one_block_that_is_used_again(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    files = []
    for call in range(1, 5):
        sent = [some_bytes(450_000, call), some_bytes(10), some_bytes(20_000, call + 1)]
        parent.send("step", call, b"in", sent)
        request = got(worker)
        assert [bytes(b) for b in request.buffers] == [bytes(b) for b in sent]
        request.release()
        worker.send("progress", call, b"half")
        assert got(parent).kind == "progress"
        result = some_bytes(100_000, call + 2)
        worker.send("done", call, b"out", [result], reply=True)
        answer = got(parent)
        assert bytes(answer.buffers[0]) == bytes(result)
        answer.release()
        answer.release()
        assert answer.buffers == []
        files.append(open_files())
        assert parent._blocks.free_bytes == 1 << 19
    assert len(set(files)) == 1
    assert len(worker._mapped) == 1


def test_a_result_larger_than_the_request_comes_in_memory_of_its_own(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    before = open_files()
    for call, request in ((1, 20_000), (2, 3)):
        parent.send("step", call, b"", [some_bytes(request)])
        got(worker).release()
        result = some_bytes(300_000, call)
        worker.send("done", call, b"", [result], reply=True)
        answer = got(parent)
        assert bytes(answer.buffers[0]) == bytes(result)
        answer.release()
    assert open_files() == before + 2  # the one block of the first request, on both sides
    worker.send("news", 0, b"", [result])
    assert bytes(got(parent).buffers[0]) == bytes(result)
    parent.send("news", 0, b"", [result])
    assert bytes(got(worker).buffers[0]) == bytes(result)


def test_decoded_results_stay_valid_after_close_and_views_do_no_harm(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    image = np.frombuffer(some_bytes(100_000), np.uint8)
    parent.send("step", 1, *encode({"image": image}))
    request = got(worker)
    view = decode(request.body, request.buffers, copy=False)["image"]
    request.release()
    worker.send("done", 1, *encode([image, image[:5]]), reply=True)
    first, second = got(parent).value()
    parent.close()
    worker.close()
    assert (first == image).all()
    assert (second == image[:5]).all()
    assert view.shape == image.shape
    del view


def test_many_parts_and_long_bodies_go_through_the_block_too(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    many = [memoryview(bytes([i % 256]) * 64) for i in range(5000)]
    parent.send("step", 1, b"b" * 300_000, [*many, some_bytes(70_000)])
    request = got(worker)
    assert request.body == b"b" * 300_000
    assert [bytes(b) for b in request.buffers[:-1]] == [bytes(b) for b in many]
    worker.send("done", 1, b"r" * 100_000, [memoryview(b""), some_bytes(8)], reply=True)
    answer = got(parent)
    assert answer.body == b"r" * 100_000
    assert [len(b) for b in answer.buffers] == [0, 8]
    with pytest.raises(ValueError, match="kind"):
        parent.send("k" * 256)


def test_errors_travel(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    worker.send("failure", 3, *encode_error(ConfigError("a must be b.")), reply=True)
    error = got(parent).error()
    assert type(error) is ConfigError
    assert str(error) == "a must be b."


def test_descriptors_travel_and_stay_the_senders(ends: tuple[Channel, Channel]) -> None:
    parent, worker = ends
    read, write = os.pipe()
    parent.send("fork", 1, b"", [some_bytes(40_000)], fds=[write])
    message = got(worker)
    os.write(message.fds[0], b"hello")
    assert os.read(read, 5) == b"hello"
    for fd in (*message.fds, read, write):
        os.close(fd)


# ---------------------------------------------------------------- a full socket


def test_a_full_socket_never_blocks_the_parent_and_loses_nothing(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    read, write = os.pipe()
    parent._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    sent = [
        parent.send("step", call, b"%d" % call, [some_bytes(20_000, call)], fds=[write])
        for call in range(1, 100)
    ]
    os.close(write)  # what waits holds a copy of its own
    assert True in sent
    assert False in sent
    assert sent == sorted(sent, reverse=True)
    assert parent.pending()
    calls = []
    while len(calls) < 99:
        parent.flush()
        message = got(worker)
        assert bytes(message.buffers[0]) == bytes(some_bytes(20_000, message.call_id))
        os.close(message.fds[0])
        calls.append(message.call_id)
        worker.send("done", message.call_id, b"", reply=True)
        got(parent).release()
    assert calls == list(range(1, 100))
    assert select.select([read], [], [], 5)[0]
    assert os.read(read, 1) == b""  # every copy is closed
    os.close(read)
    assert parent._blocks.free_bytes == 8 * SMALLEST
    parent.send("stats")  # after the news of the blocks that are gone
    kinds: list[str] = []
    reader = threading.Thread(target=lambda: kinds.append(got(worker).kind))
    reader.start()
    while not parent.flush():
        select.select([], [parent.fileno()], [], 10)
    reader.join(10)
    assert kinds == ["stats"]
    assert not parent.pending()
    assert len(worker._mapped) == 8


def test_a_parent_closed_with_waiting_messages_leaves_nothing(
    ends: tuple[Channel, Channel],
) -> None:
    parent, _ = ends
    while parent.send("step", 1, b"", [some_bytes(20_000)]):
        parent._lent.pop(1).close()
    parent.send("step", 2, b"", [some_bytes(20_000)], fds=[0])
    parent.close()
    with pytest.raises(ChannelClosed):
        parent.send("stats")


# ---------------------------------------------------------------- the end


def test_messages_sent_before_the_end_still_arrive() -> None:
    here, there = Channel.pair()
    parent, worker = Channel(here, "parent"), Channel(there, "worker")
    parent.send("step", 1, b"never read")
    worker.send("ready", 0, b"", [some_bytes(50_000)])
    worker.send("failure", 0, b"last words")
    worker.close()
    assert len(got(parent).buffers[0]) == 50_000
    assert got(parent).body == b"last words"
    for _ in range(2):
        with pytest.raises(ChannelClosed) as caught:
            parent.receive()
        assert isinstance(caught.value, EOFError)
    with pytest.raises(ChannelClosed):
        parent.send("step", 2, b"", [some_bytes(50_000)])
    parent.close()
    parent.close()
    assert parent.fileno() == -1
    with pytest.raises(ChannelClosed):
        parent.receive()


def test_close_wakes_a_thread_that_waits() -> None:
    here, there = Channel.pair()
    worker = Channel(there, "worker")
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            worker.receive()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    worker.close()
    assert ended.wait(10)
    thread.join()
    here.close()


def test_a_forked_copy_forgets_without_ending_the_connection(
    ends: tuple[Channel, Channel],
) -> None:
    parent, worker = ends
    parent.send("step", 1, b"", [some_bytes(50_000)])
    copy = Channel(socket.socket(fileno=os.dup(worker.fileno())), "worker")
    assert fcntl.fcntl(copy.fileno(), fcntl.F_GETFD) >= 0
    copy.forget()
    assert len(got(worker).buffers[0]) == 50_000
    assert worker.send("done", 1, reply=True)
    assert got(parent).reply


# ---------------------------------------------------------------- real processes


def _answer(sock: socket.socket) -> None:
    worker = Channel(sock, "worker")
    with contextlib.suppress(ChannelClosed):
        while (message := worker.receive()) is not None:
            value = message.value()
            if isinstance(value, str):
                os.kill(os.getpid(), signal.SIGKILL)
            worker.send("done", message.call_id, *encode(value), reply=True)


def _collect(parent: Channel, done: list[tuple[int, bytes]]) -> None:
    """Take results until the channel ends."""
    while True:
        select.select([parent.fileno()], [], [], 60)
        if (message := parent.receive()) is not None:
            done.append((message.call_id, message.value().tobytes()))


@pytest.mark.slow
def test_a_worker_killed_amid_requests_ends_the_channel_and_leaks_nothing() -> None:
    context = multiprocessing.get_context("spawn")
    warm = context.Process(target=int)  # multiprocessing's own helper process keeps a descriptor
    warm.start()
    warm.join()
    before = open_files()
    for _ in range(2):
        here, there = Channel.pair()
        process = context.Process(target=_answer, args=(there,))
        process.start()
        there.close()
        parent = Channel(here, "parent")
        image = np.frombuffer(some_bytes(450_000), np.uint8)
        for call, value in enumerate([image, image[:9], "die", image, image], 1):
            parent.send("step", call, *encode(value))
        done: list[tuple[int, bytes]] = []
        with pytest.raises(ChannelClosed):
            _collect(parent, done)
        assert done == [(1, image.tobytes()), (2, image[:9].tobytes())]
        process.join(10)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        parent.close()
        assert open_files() == before


@pytest.mark.gpu
def test_cuda_tensors_travel_both_ways_and_arrive_in_memory_of_their_own() -> None:
    here, there = Channel.pair()
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=(there,))
    process.start()
    there.close()
    parent = Channel(here, "parent")
    sent = torch.arange(60, device="cuda", dtype=torch.bfloat16).view(3, 20).t()[2:]
    results: list[torch.Tensor] = []
    for call in (1, 2):
        parent.send("step", call, *encode({"x": sent}))
        select.select([parent.fileno()], [], [], 120)
        message = parent.receive()
        assert message is not None
        results.append(message.value()["x"])
    parent.close()
    process.join(60)
    for result in results:  # the process that computed them is gone
        assert result.device == sent.device
        assert torch.equal(result, sent)


@pytest.mark.slow
def test_classes_of_the_main_module_travel_to_a_spawned_process(tmp_path: Path) -> None:
    script = tmp_path / "main_module.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import select
            from dataclasses import dataclass

            from phyai.deployment.channel import Channel
            from phyai.deployment.values import encode, encode_error

            @dataclass
            class Mine:
                a: int

            class Oops(Exception):
                pass

            def work(sock):
                worker = Channel(sock, "worker")
                got = worker.receive().value()
                worker.send("done", 1, *encode((got, type(got).__module__, Mine(2))))
                worker.send("oops", 1, *encode_error(Oops("no")), reply=True)
                worker.receive()

            if __name__ == "__main__":
                here, there = Channel.pair()
                process = multiprocessing.get_context("spawn").Process(target=work, args=(there,))
                process.start()
                there.close()
                parent = Channel(here, "parent")
                parent.send("step", 1, *encode(Mine(1)))
                found = []
                while len(found) < 2:
                    select.select([parent.fileno()], [], [])
                    message = parent.receive()
                    if message is not None:
                        found.append(message.error() if message.reply else message.value())
                assert found[0] == (Mine(1), "__mp_main__", Mine(2)), found
                assert type(found[1]) is Oops, found
                parent.close()
                process.join(30)
                print("as it should be", process.exitcode)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert "as it should be" in done.stdout, done.stderr


def test_a_flood_of_large_requests_needs_few_descriptors(ends: tuple[Channel, Channel]) -> None:
    """Who sends faster than a worker reads must not run out of them, or lose the order."""
    parent, worker = ends
    count, before = 300, open_files()
    for number in range(1, count + 1):
        data = np.full(1 << 15, number % 251, np.uint8)
        parent.send("step", number, *encode(data))
        data[:] = 255  # what was sent is a copy
    assert parent.pending()
    assert open_files() - before < 100
    answered = 0
    while answered < count:
        parent.flush()
        message = worker.receive()
        assert message is not None
        call_id = message.call_id
        value = message.value()
        assert call_id == answered + 1
        assert {int(value[0]), int(value[-1])} == {call_id % 251}
        worker.send("result", call_id, *encode(value), reply=True)
        answer = parent.receive()
        assert answer is not None
        assert int(answer.value()[0]) == call_id % 251
        answered += 1
