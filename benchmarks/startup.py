"""How long `import phyai`, `phyai --help` and `phyai plugins` take, each in a fresh process.

    python benchmarks/startup.py [--repeat 9]

Prints the median wall time, the fastest, and the median over a bare interpreter's. The commands
take turns, so that a busy moment of the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Case:
    """A command and its wall times in seconds. limit_s: what the project promises."""

    name: str
    command: Sequence[str]
    limit_s: float | None
    times_s: list[float] = field(default_factory=list)

    def run(self) -> None:
        began = time.perf_counter()
        subprocess.run(self.command, check=True, stdout=subprocess.DEVNULL)
        self.times_s.append(time.perf_counter() - began)


def cases() -> list[Case]:
    phyai = str(Path(sys.executable).with_name("phyai"))
    python = sys.executable
    return [
        Case("python -c pass", [python, "-c", "pass"], None),
        Case("import phyai", [python, "-c", "import phyai"], 0.1),
        Case("phyai --help", [phyai, "--help"], 0.3),
        Case("phyai plugins", [phyai, "plugins"], 0.3),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9, help="runs of each command, at least 7")
    repeat = max(parser.parse_args().repeat, 7)
    measured = cases()
    for case in measured:
        case.run()  # fills the file cache and writes .pyc files
        case.times_s.clear()
    for _ in range(repeat):
        for case in measured:
            case.run()
    bare = statistics.median(measured[0].times_s)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}, "
          f"median of {repeat}")  # fmt: skip
    print(f"{'command':<16}{'median':>9}{'fastest':>9}{'over bare':>11}{'promised':>10}")
    for case in measured:
        median = statistics.median(case.times_s)
        promised = "" if case.limit_s is None else f"< {case.limit_s:g} s"
        late = case.limit_s is not None and median >= case.limit_s
        print(f"{case.name:<16}{median:8.3f}s{min(case.times_s):8.3f}s{median - bare:10.3f}s"
              f"{promised:>10}{'  LATE' if late else ''}")  # fmt: skip


if __name__ == "__main__":
    main()
