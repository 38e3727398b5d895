"""The processes of the benchmark, and what they use of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from benchmarks.gateway_processes import MODEL

ROOT = Path(__file__).resolve().parents[1]
START_S = 30.0
STOP_S = 10.0


class Process:
    """A child of the benchmark; raises RuntimeError where it does not start."""

    def __init__(self, name: str, *command: str) -> None:
        self.name = name
        self._child = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def lines(self) -> Iterable[str]:
        """Give its output, for at most START_S seconds; raises RuntimeError at its end."""
        out: IO[str] | None = self._child.stdout
        assert out is not None
        late = threading.Timer(START_S, self._child.kill)
        late.start()
        try:
            for line in out:
                yield line.strip()
        finally:
            late.cancel()
        raise RuntimeError(f"the process {self.name} must start; it ended, see above.")

    def stop(self) -> None:
        self._child.terminate()
        try:
            self._child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()


class World:
    """Stub server, bare proxy and gateway. ports: by path."""

    def __init__(self, stack: ExitStack) -> None:
        self.processes: dict[str, Process] = {}
        self.ports: dict[str, int] = {}
        here = "benchmarks.gateway_processes"
        self.ports["direct"] = self._one_port(stack, "stub", "-m", here, "stub")
        server = f"127.0.0.1:{self.ports['direct']}"
        self.ports["bare"] = self._one_port(stack, "bare", "-m", here, "bare", server)
        self._gateway(stack, server)

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of every process so far, this one as ``client``."""
        pids = {name: process.pid for name, process in self.processes.items()}
        return {name: cpu_s(pid) for name, pid in {**pids, "client": os.getpid()}.items()}

    def _start(self, stack: ExitStack, name: str, *command: str) -> Process:
        process = self.processes[name] = Process(name, *command)
        stack.callback(process.stop)
        return process

    def _one_port(self, stack: ExitStack, name: str, *command: str) -> int:
        return int(next(iter(self._start(stack, name, *command).lines())))

    def _gateway(self, stack: ExitStack, server: str) -> None:
        listens = [f"--listen={name}=127.0.0.1:0" for name in ("lerobot", "openpi", "gr00t")]
        process = self._start(
            stack, "gateway", "-m", "phyai_gateway.cli", "--backend", MODEL, server,
            "--gateway", "127.0.0.1:0", "--http-port", "0", "--log-level", "error", *listens,
        )  # fmt: skip
        wanted = {"native", "lerobot", "openpi", "gr00t"}
        for line in process.lines():
            name, found, address = line.partition(" listens on ")
            if found and name in wanted:
                self.ports[name] = int(address.rpartition(":")[2])
                wanted.discard(name)
            if not wanted:
                return


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process's threads: in nanoseconds, not in the kernel's ticks."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[0])
        except (OSError, IndexError, ValueError):  # a thread that has just ended
            continue
    return total / 1e9


def busy_s() -> float:
    """Return the CPU seconds that the whole machine has worked."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _, _, irq, softirq, *_ = fields
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
