"""What tests of channels, messages and blocks share: bytes, open files, the next message."""

from __future__ import annotations

import os

import numpy as np

from phyai.deployment.channel import Channel, Message


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def some_bytes(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(np.random.default_rng(seed).bytes(size)))


def got(channel: Channel) -> Message:
    message = channel.receive()
    assert message is not None
    return message
