"""The machine around a measurement: memory left, CPU time of others, and how fast it is now."""

from __future__ import annotations

import datetime
import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
_FAST_BF16 = ("amx_bf16", "avx512_bf16")
_PASSES = 8  # the best of them: one pass alone is disturbed easily
_LEAST_S = 0.01
_MEMORY_BYTES = 2**27  # larger than the caches of a small server


def available_bytes() -> int:
    """Return MemAvailable."""
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo must hold MemAvailable; this system has none.")


def cpu_features() -> list[str]:
    """Return which of the instruction sets that matter the CPU has."""
    flags = _cpuinfo("flags").split()
    return [name for name in _FEATURES if name in flags]


def conditions() -> dict[str, Any]:
    """Return date, CPU, cores, memory, load and versions of the parent."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpuinfo("model name") or platform.machine(),
        "cpu_features": cpu_features(),
        "cores": os.cpu_count(),
        "memory_available_gib": round(available_bytes() / 2**30, 2),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "torch_parent": torch.__version__,
    }


def _cpuinfo(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


@dataclass(frozen=True, slots=True)
class CpuSample:
    """Seconds since some start: wall, busy on all cores, and busy in our own processes."""

    wall_s: float
    busy_s: float
    own_s: float

    def foreign_since(self, before: CpuSample) -> float:
        """Return the CPU seconds that others used between two samples."""
        return max(0.0, (self.busy_s - before.busy_s) - (self.own_s - before.own_s))


def cpu_sample(sessions: Iterable[int]) -> CpuSample:
    """Return what the cores did; ours are this process and every process of these sessions."""
    ours, me = set(sessions), os.getpid()
    busy = _busy_s(Path("/proc/stat").read_text(encoding="utf-8"))
    own = 0.0
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            try:
                text = Path(f"/proc/{folder}/stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it ended meanwhile
            session, seconds = process_times(text)
            if session in ours or int(folder) == me:
                own += seconds
    return CpuSample(time.monotonic(), busy, own)


def _busy_s(stat: str) -> float:
    """Return user, nice, system, irq, softirq and steal time of all cores."""
    fields = [int(text) for text in stat.split("\n", 1)[0].split()[1:]]
    return sum(fields[i] for i in (0, 1, 2, 5, 6, 7)) * _TICK_S


def process_times(stat: str) -> tuple[int, float]:
    """Return session and CPU seconds, ended children included, of a ``/proc/PID/stat`` line."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[3]), sum(int(fields[i]) for i in (11, 12, 13, 14)) * _TICK_S


class SpeedProbe:
    """Measures a matrix product and a read of memory, about half a second a call.

    The product is bfloat16 where the CPU has instructions for it, else float32.
    """

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        fast = any(name in cpu_features() for name in _FAST_BF16)
        self.dtype = torch.bfloat16 if fast else torch.float32
        self._matrix = torch.ones(_MEMORY_BYTES // 4 // 4096, 4096)
        self._vector = torch.ones(4096)
        size = 512
        while True:
            self.size = size
            self._a, self._b = (torch.rand(size, size).to(self.dtype) for _ in range(2))
            if size >= 4096 or _best_s(self._product, 2) >= _LEAST_S:
                break
            size *= 2

    def _product(self) -> None:
        torch.mm(self._a, self._b)

    def __call__(self) -> dict[str, float]:
        matrix = 2 * self.size**3 / _best_s(self._product, _PASSES)
        memory = _MEMORY_BYTES / _best_s(lambda: torch.mv(self._matrix, self._vector), _PASSES)
        return {"matrix_flops_per_s": matrix, "memory_bytes_per_s": memory}


def _best_s(run: Callable[[], object], passes: int) -> float:
    best = float("inf")
    for _ in range(passes):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best
