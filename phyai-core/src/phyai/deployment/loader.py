"""The loader: a process that loads the model once, and forks workers that share its memory.

Weights, packed copies of them and tables are in its memory; a fork has them without a copy, as long
as nobody writes to them. It runs no parallel code and no thread, because a fork has only one.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from phyai.deployment.begin import use_stderr
from phyai.deployment.channel import Channel, ChannelClosed, Message
from phyai.deployment.launch import Launch
from phyai.deployment.lifeline import tie
from phyai.deployment.values import decode, encode, encode_error
from phyai.deployment.worker import Telling, build, leave, refuse, work
from phyai.engine_core import EngineCore
from phyai.errors import WeightUpdateError


def load_and_fork(sock: socket.socket, launch: Launch, lifeline: int) -> NoReturn:
    """Run as a loader that loads from the checkpoint."""
    torch.set_num_threads(1)
    channel = Channel(sock, "worker")
    telling = Telling(channel)
    try:
        core = build(launch, telling)
    except BaseException as error:
        refuse(channel, error)
    _Loader(core, channel, telling, lifeline, launch).serve()


class _Loader:
    """Forks when it is asked to, tells how its children ended, and ends with the engine."""

    def __init__(
        self, core: EngineCore, channel: Channel, telling: Telling, lifeline: int, launch: Launch
    ) -> None:
        self.core, self.channel, self.telling = core, channel, telling
        self.lifeline, self.launch = lifeline, launch
        self.children: dict[int, int] = {}  # descriptor of its end -> pid

    def serve(self) -> NoReturn:
        self._settle()
        self.channel.send("loaded", 0, *encode(_other_threads()))
        try:
            while self._wait() and self._take(self.channel.receive()):
                pass
        except ChannelClosed:  # the engine's process is gone
            for pid in self.children.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        leave()

    def _settle(self) -> None:
        _stop_progress_bars()
        gc.collect()
        _give_memory_back()
        gc.freeze()  # the collector would write to every object, and so copy its page

    def _wait(self) -> bool:
        """Wait for a message; meanwhile tell of children that ended."""
        while True:
            watch = select.poll()
            for descriptor in (self.channel.fileno(), *self.children):
                watch.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in watch.poll()]
            for descriptor in ready:
                if (pid := self.children.pop(descriptor, None)) is not None:
                    os.close(descriptor)
                    _, status = os.waitpid(pid, 0)
                    self.channel.send("ended", 0, *encode((pid, status)))
            if self.channel.fileno() in ready:
                return True

    def _take(self, message: Message | None) -> bool:
        if message is None or message.kind == "exit":
            return False
        if message.kind == "fork":
            serial, order = decode(message.body, message.buffers)
            self._fork(serial, message.fds, lambda sock: self._worker(sock, order))
        elif message.kind == "candidate":
            serial = decode(message.body, message.buffers)
            self._fork(serial, message.fds, self._candidate)
        elif message.kind == "update":
            self._update(message)
        return True

    # ------------------------------------------------------------ children

    def _fork(
        self, serial: int, descriptors: list[int], run: Callable[[socket.socket], None]
    ) -> None:
        sock, stderr = descriptors
        threads = _other_threads()
        if threads:
            self.channel.send("threads", 0, *encode((serial, threads)))
        else:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()  # or the child would say it again
            pid = os.fork()
            if pid == 0:
                self._child(sock, stderr, run)
            self.children[os.pidfd_open(pid)] = pid
            self.channel.send("forked", 0, *encode((serial, pid)))
        os.close(sock)
        os.close(stderr)

    def _child(self, sock: int, stderr: int, run: Callable[[socket.socket], None]) -> NoReturn:
        """Go on as another process; never return into the loader's."""
        try:
            tie(self.lifeline)
            self.channel.forget()
            for descriptor in self.children:
                os.close(descriptor)
            self.children = {}
            use_stderr(stderr)
            run(socket.socket(fileno=sock))
        except BaseException:
            traceback.print_exc()
        leave(1)

    def _worker(self, sock: socket.socket, order: Any) -> None:
        channel = Channel(sock, "worker")
        self.telling.channel = channel
        work(self.core, channel, order, warm=self.launch.config.runtime.warmup)

    def _candidate(self, sock: socket.socket) -> None:
        """A loader that waits for new weights."""
        self.channel = self.telling.channel = Channel(sock, "worker")
        self.serve()

    # ------------------------------------------------------------ weights

    def _update(self, message: Message) -> None:
        """Take over new weights in our own memory; workers have the old ones."""
        try:
            self.core.adapter.update_weights(decode(message.body, message.buffers, copy=False))
            self.core.runner.refresh()
        except BaseException as error:
            if not isinstance(error, WeightUpdateError):
                wrapped = WeightUpdateError(
                    f"weights must fit plugin {self.launch.plugin!r}; got "
                    f"{type(error).__name__}: {error}. Nothing was changed."
                )
                wrapped.__cause__ = error
                error = wrapped
            self.channel.send("update_error", 0, *encode_error(error))
            return
        finally:
            message.release()
        self._settle()
        self.channel.send("updated", 0, *encode(_other_threads()))


def _give_memory_back() -> None:
    """Have the C library return what loading freed; only glibc keeps it, and has the call."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _stop_progress_bars() -> None:
    """End the thread that tqdm starts with its first bar, as of a download."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if (monitor := getattr(bars, "monitor", None)) is not None:
        monitor.exit()


def _other_threads() -> list[str]:
    """Return the names of this process's threads but the main one, as the kernel knows them."""
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
    return sorted(names)
