"""What a process of a pool is told, and how a fresh one is started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import spawn as spawning
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Literal

from phyai.deployment.channel import Channel
from phyai.deployment.processes import ProcessHandle
from phyai.errors import ConfigError

if TYPE_CHECKING:
    from phyai.adapter import AdapterArgs
    from phyai.engine_config import EngineConfig
    from phyai.ranks.spawned import RankOrder


@dataclass(frozen=True)
class Launch:
    """What a process needs to build its copy of the model.

    version: of the plugin's distribution; the process looks the plugin up in its own environment
    and refuses another one.  num_threads: of a CPU worker.
    """

    plugin: str
    plugin_args: AdapterArgs
    config: EngineConfig
    version: str | None
    num_threads: int


@dataclass(frozen=True)
class WorkerOrder:
    """What one worker is told besides: which replica it is, and how it should behave.

    reseed: draw a new seed for the process, so that replicas do not repeat each other.
    ranks: which rank of the replica it is; None = there is one.
    """

    replica: int
    num_threads: int
    heartbeat_s: float
    result_device: str | None
    reseed: bool
    ranks: RankOrder | None = None


def worker_threads(config_threads: int | None, workers: int) -> int:
    """Return the CPU threads of one of so many workers: as configured, or the cores by workers.

    ``OMP_NUM_THREADS`` counts as a configuration: it is meant for each process.
    """
    if config_threads is not None:
        return config_threads
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) >= 1:
        return int(given)
    return max(1, len(os.sched_getaffinity(0)) // workers)


def spawn(
    role: Literal["loader", "worker", "rank"],
    launch: Launch,
    order: WorkerOrder | None,
    *,
    lifeline: int,
    stderr: int,
    variables: Mapping[str, str],
    keep: tuple[int, ...] = (),
) -> tuple[subprocess.Popen[bytes], ProcessHandle, socket.socket]:
    """Start a fresh interpreter in ``phyai.deployment.begin``; return our end of its channel, too.

    It imports the caller's main module first, as processes of multiprocessing do, so that classes
    of it can travel. It is tied to the lifeline and writes to ``stderr`` before it imports
    anything large.  variables: environment besides ours, which libraries read when they load.
    keep: descriptors it gets, too, by the same numbers.
    Raises: what keeps ``launch`` from travelling; RuntimeError in a process that imports its main
        module for us, which must not start engines then.
    """
    _check_folder()
    told = ForkingPickler.dumps((launch, order))
    preparation = spawning.get_preparation_data(f"phyai-{role}")
    preparation.pop("authkey", None)  # a secret, which our processes have no use for
    if not os.path.isfile(preparation.get("init_main_from_path", "")):
        preparation.pop("init_main_from_path", None)  # a program read from stdin
    prepared = ForkingPickler.dumps(preparation)
    ours, theirs = Channel.pair()
    here, there = socket.socketpair()
    try:
        with theirs, there:
            fds = (lifeline, theirs.fileno(), there.fileno())
            process = subprocess.Popen(
                _command(role, fds),
                env={**os.environ, **variables},
                pass_fds=(*fds, *keep),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        connection = Connection(here.detach())
        try:
            connection.send_bytes(prepared)
            connection.send_bytes(told)
        except OSError:  # it has died already, which is told like any other death
            pass
        finally:
            connection.close()
    except BaseException:
        ours.close()
        here.close()
        raise
    return process, ProcessHandle(process.pid), ours


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"working directory must exist when processes are started; got {error}. Change to "
            "one that does."
        ) from error


def _command(role: str, fds: tuple[int, int, int]) -> list[str]:
    """Return the command line of this interpreter, with its options, for another process."""
    plain = spawning.get_command_line()
    path = [os.path.abspath(folder) for folder in sys.path]
    code = (
        f"import sys; sys.path[:] = {path!r}; "
        f"from phyai.deployment.begin import main; main({role!r}, *{fds!r})"
    )
    return [*plain[: plain.index("-c")], "-c", code]
