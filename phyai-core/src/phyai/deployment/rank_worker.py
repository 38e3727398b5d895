"""A rank that follows: a process that does what rank 0 of its replica says."""

from __future__ import annotations

import contextlib
import socket
from typing import NoReturn

from phyai.deployment.channel import Channel
from phyai.deployment.launch import Launch, WorkerOrder
from phyai.deployment.worker import build, give_up, leave, refuse, settle
from phyai.engine_core import EngineCore
from phyai.services import no_progress


def load_and_follow(sock: socket.socket, launch: Launch, order: WorkerOrder) -> NoReturn:
    """Run as a rank other than 0: load a part of the model, then follow until rank 0 closes."""
    channel = Channel(sock, "worker")
    try:
        core = build(launch, no_progress, order)
        settle(order)
    except BaseException as error:
        refuse(channel, error)
    _follow(core, channel)


def _follow(core: EngineCore, channel: Channel) -> NoReturn:
    assert core.ranks is not None
    try:
        core.ranks.serve()
    except BaseException as error:
        give_up(channel, error)
    with contextlib.suppress(Exception):
        core.close()
    leave()
