"""100 robots, 200 requests a second, 4 stub backends: errors, memory and what the gateway adds.

python -m benchmarks.load                      10 s of load
python -m benchmarks.load --seconds 60         the soak run
python -m benchmarks.load --overload           three times what the backends carry, then half of it

50 kB per observation: JPEG over native gRPC (70 robots), raw over LeRobot and openpi (15 each). Ten
requests a second go to the backends directly, for the difference. Exits with 1 if a rule is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.load_backend import MODEL
from benchmarks.load_robots import (
    REFUSALS,
    DirectRobot,
    LerobotRobot,
    NativeRobot,
    OpenpiRobot,
    Robot,
    Tally,
)
from PIL import Image

ROOT = Path(__file__).parents[1]
BACKENDS = 4
WARM_UP_S = 3.0
RECOVERY_S = 5.0
DIRECT_RATE = 10.0
MOST_GROWTH = 0.02  # under a load that it carries
MOST_GROWN_MIB = 64  # under one that it does not: 4 requests of 50 kB from each of 100 robots
JPEG_BYTES = 50_000
TICK_S = 0.25
TYPED = {"ok", "superseded", "stale", "empty", "skipped"}
TYPED |= {"resource_exhausted", "unavailable", "deadline_exceeded"}


def jpeg() -> bytes:
    """Return a picture of about 50 kB."""
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 255, (224, 224, 3), np.uint8))
    for quality in range(95, 5, -5):
        out = io.BytesIO()
        picture.save(out, "JPEG", quality=quality)
        if out.tell() <= 1.1 * JPEG_BYTES:
            break
    return out.getvalue()


@dataclass
class World:
    """The running processes. ports: of the gateway by protocol."""

    gateway: Any
    ports: dict[str, int]
    backends: list[int]
    memory: list[tuple[float, int]] = field(default_factory=list)
    queues: list[int] = field(default_factory=list)

    def sample(self) -> None:
        pages = int(Path(f"/proc/{self.gateway.pid}/statm").read_text().split()[1])
        self.memory.append((time.monotonic(), pages * resource.getpagesize()))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.gateway.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def waited_s(self) -> float:
        """Return how long the gateway's loop was ready to run and had no processor."""
        return int(Path(f"/proc/{self.gateway.pid}/schedstat").read_text().split()[1]) / 1e9

    def snapshot(self) -> Any:
        url = f"http://127.0.0.1:{self.ports['http']}/v1/backends"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)

    def growth(self, since: float) -> float:
        """Return how much the gateway has grown, of its size a second after ``since``."""
        after = [(at, size) for at, size in self.memory if at >= since]
        first = [size for at, size in after if at < since + 1.5]
        last = [size for at, size in after if at > after[-1][0] - 1.5]
        return statistics.median(last) / statistics.median(first) - 1


@asynccontextmanager
async def running(delay_s: float, places: int) -> AsyncIterator[World]:
    """Start backends and gateway, each a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load_backend", str(delay_s), str(places)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": ROOT}
    processes = [subprocess.Popen(command, **pipes) for _ in range(BACKENDS)]
    gateway = None
    try:
        backends = [int(process.stdout.readline()) for process in processes if process.stdout]
        command = [sys.executable, "-u", "-m", "phyai_gateway.cli", "--log-level", "warning"]
        command += ["--gateway", "127.0.0.1:0", "--http-port", "0", "--lerobot", "127.0.0.1:0"]
        command += ["--listen", "openpi=127.0.0.1:0"]
        for port in backends:
            command += ["--backend", MODEL, f"127.0.0.1:{port}"]
        gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert gateway.stdout is not None
        ports: dict[str, int] = {}
        while len(ports) < 4:
            line = gateway.stdout.readline()
            if not line:
                raise SystemExit("the gateway ended; its messages say why")
            if " listens on " in line:
                name, _, where = line.strip().partition(" listens on ")
                ports[name] = int(where.rpartition(":")[2])
        world = World(gateway, ports, backends)
        while sum(row["healthy"] for row in world.snapshot()["backends"]) < BACKENDS:
            await asyncio.sleep(0.1)
        yield world
    finally:
        for process in (*processes, *([gateway] if gateway else [])):
            process.kill()
            process.wait()


def crew(world: World, robots: int, tally: Tally, *, named: bool) -> list[Robot]:
    """Return the robots of the mix. named: half of the native ones tell who they are."""
    picture = jpeg()
    found: list[Robot] = []
    for number in range(robots):
        if number % 20 < 14:
            port = world.ports["native"]
            who = named and number % 2 == 0
            found.append(NativeRobot(number, port, tally, picture, who))
        elif number % 20 < 17:
            found.append(OpenpiRobot(number, world.ports["openpi"], tally))
        else:
            found.append(LerobotRobot(number, world.ports["lerobot"], tally))
    return found


async def drive(
    world: World, robots: Sequence[Robot], rate: float, seconds: float, *, at_once: bool = False
) -> None:
    """Let all robots tick at ``rate`` for so long, looking at the gateway meanwhile.

    at_once: in the same moments, not one after the other.
    """
    until = time.monotonic() + seconds
    period = len(robots) / rate
    works = [
        asyncio.create_task(
            robot.work(period, 0.0 if at_once else period * at / len(robots), until)
        )
        for at, robot in enumerate(robots)
    ]
    while not all(task.done() for task in works):
        world.sample()
        await asyncio.sleep(TICK_S)
    for task in works:
        task.result()


async def watch(world: World, seconds: float) -> None:
    """Note how many requests wait in the gateway, twice a second."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        snapshot = await asyncio.to_thread(world.snapshot)
        world.queues.append(sum(row["queue"] + row["in_flight"] for row in snapshot["models"]))
        await asyncio.sleep(0.5)


async def connected(robots: Sequence[Robot]) -> None:
    for at in range(0, len(robots), 20):
        await asyncio.gather(*(robot.start() for robot in robots[at : at + 20]))


async def steady(seconds: float, robots: int, rate: float) -> tuple[dict[str, Any], list[str]]:
    """Run the load; returns figures, and the rules that were broken."""
    async with running(delay_s=0.01, places=16) as world:
        tally, direct = Tally(), Tally()
        found = crew(world, robots, tally, named=False)
        beside: list[Robot] = [
            DirectRobot(at, port, direct, jpeg(), False) for at, port in enumerate(world.backends)
        ]
        await connected([*found, *beside])

        async def both(length: float) -> None:
            await asyncio.gather(
                drive(world, found, rate, length), drive(world, beside, DIRECT_RATE, length)
            )

        # The most that can come at once, so that what memory needs for it is known before.
        await drive(world, found, rate, WARM_UP_S, at_once=True)
        await both(WARM_UP_S)
        warm = tally.begin()
        direct.begin()
        began, cpu, waited = time.monotonic(), world.cpu_s(), world.waited_s()
        await both(seconds)
        took = time.monotonic() - began
        await asyncio.gather(*(robot.close() for robot in (*found, *beside)))
        answered, skipped = tally.total("ok"), tally.total("skipped")
        failed = sum(tally.counts.values()) - answered - skipped
        growth = world.growth(began + took / 5)  # what the burst needed has been given back
        figures = {
            "robots": robots,
            "seconds": round(took, 1),
            "asked": answered + failed,
            "answered": answered,
            "rate": round(answered / took, 1),
            "errors": failed,
            "refused": tally.total(*REFUSALS, "empty"),
            "skipped": skipped,
            "rss_mib": round(world.memory[-1][1] / 2**20, 1),
            "rss_growth": round(growth, 4),
            "starved": round((world.waited_s() - waited) / took, 3),
            "gateway_cpu_ms": round(1e3 * (world.cpu_s() - cpu) / max(answered, 1), 2),
            "direct_ms": _times(direct, "direct"),
            **{f"{name}_ms": _times(tally, name) for name in ("native", "openpi", "lerobot")},
        }
        native, alone = figures["native_ms"], figures["direct_ms"]
        figures["added_ms"] = {key: round(native[key] - alone[key], 2) for key in native}
    rules = {
        f"no request fails: {dict(tally.counts)} {tally.errors}": not figures["errors"],
        f"no request fails while warming up: {dict(warm)}": {kind for _, kind in warm}
        <= {"ok", "skipped"},
        f"95 % of the rate is reached: {figures['rate']}": figures["rate"] >= 0.95 * rate,
        f"memory grows by less than 2 %: {growth:.2%}": growth < MOST_GROWTH,
    }
    return figures, [rule for rule, held in rules.items() if not held]


def _good(counts: Counter[tuple[str, str]]) -> bool:
    return {kind for _, kind in counts} <= {"ok", "skipped"}


def _times(tally: Tally, protocol: str) -> dict[str, float]:
    return {
        "p50": round(tally.quantile_ms(protocol, 0.5), 2),
        "p99": round(tally.quantile_ms(protocol, 0.99), 2),
    }


async def overload(seconds: float, robots: int) -> tuple[dict[str, Any], list[str]]:
    """Ask for three times what the backends carry, then for half of it."""
    delay_s, places = 0.1, 2
    carries = BACKENDS * places / delay_s
    async with running(delay_s, places) as world:
        tally = Tally()
        found = crew(world, robots, tally, named=True)
        await connected(found)
        await drive(world, found, carries / 2, WARM_UP_S)
        calm = tally.begin()
        began, waited = time.monotonic(), world.waited_s()
        await asyncio.gather(drive(world, found, 3 * carries, seconds), watch(world, seconds))
        took = time.monotonic() - began
        starved = (world.waited_s() - waited) / took
        loaded, eased = tally.begin(), time.monotonic()
        await drive(world, found, carries / 2, RECOVERY_S + 4)
        recovery = max(tally.last_bad - eased, 0.0)
        before = max(size for at, size in world.memory if at < began)
        grown = (max(size for _, size in world.memory) - before) / 2**20
        answered = sum(count for (_, kind), count in loaded.items() if kind == "ok")
        kinds = sorted({kind for _, kind in loaded})
        figures = {
            "robots": robots,
            "carries": carries,
            "asked": sum(loaded.values()),
            "answered_rate": round(answered / took, 1),
            "outcomes": {
                kind: sum(c for (_, k), c in loaded.items() if k == kind) for kind in kinds
            },
            "most_held": max(world.queues),
            "rss_grown_mib": round(grown, 1),
            "recovery_s": round(recovery, 2),
            "starved": round(starved, 3),
        }
        await asyncio.gather(*(robot.close() for robot in found))
    # 16 may wait per backend, and each holds its places and as many again; polls may add one each.
    bound = BACKENDS * (16 + 2 * places) + BACKENDS
    rules = {
        f"nothing fails before: {dict(calm)}": _good(calm),
        f"only typed refusals: {kinds} {tally.errors}": set(kinds) <= TYPED,
        f"queues are bounded by {bound}: {figures['most_held']}": figures["most_held"] <= bound,
        f"memory grows by less than {MOST_GROWN_MIB} MiB: {grown:.1f}": grown < MOST_GROWN_MIB,
        f"70 % of what it carries is still answered: {answered / took:.0f}/s": (
            answered / took >= 0.7 * carries
        ),
        f"recovery in {RECOVERY_S:g} s: {recovery:.2f} s": recovery <= RECOVERY_S,
    }
    return figures, [rule for rule, held in rules.items() if not held]


def conditions() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }


def report(args: argparse.Namespace, figures: dict[str, Any], broken: Sequence[str]) -> str:
    """Return the run as a page for docs/reports."""
    words = ["python -m benchmarks.load", f"--seconds {args.seconds:g}"]
    words += ["--overload"] if args.overload else []
    kind = "Overload" if args.overload else "Load"
    lines = [
        f"# {kind} of the gateway",
        "",
        f"`{' '.join(words)}`, {time.strftime('%Y-%m-%d')}.",
        "",
    ]
    lines += ["| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in figures.items()]
    lines += ["", "Rules: " + ("all held." if not broken else "broken: " + "; ".join(broken))]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--robots", type=int, default=100)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second, of all")
    parser.add_argument("--overload", action="store_true")
    parser.add_argument("--save", type=Path, metavar="JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="a report, with conditions")
    args = parser.parse_args(argv)
    work: Callable[[], Any] = (
        (lambda: overload(args.seconds, args.robots))
        if args.overload
        else (lambda: steady(args.seconds, args.robots, args.rate))
    )
    figures, broken = asyncio.run(work())
    for name, value in {**figures, **conditions()}.items():
        print(f"{name:>16}  {value}")
    if args.save is not None:
        args.save.write_text(json.dumps({**figures, "conditions": conditions()}, indent=1) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(report(args, {**figures, **conditions()}, broken))
    for rule in broken:
        print(f"BROKEN: {rule}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
