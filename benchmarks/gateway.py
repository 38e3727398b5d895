"""Compare the paths through the gateway with a client's direct way to the model server.

    python benchmarks/gateway.py
    python benchmarks/gateway.py --rounds 4 --slice-s 0.15 --json

Paths. direct: a gRPC client and a model server that answers at once. bare: a proxy of twenty lines
between them, what the library itself costs. native, lerobot, openpi, gr00t: through one gateway,
each with its own client. All send the same observation, 3 x 224 x 224 x 3 bytes and a state, and
get 50 x 7 float32; first it is checked that all get the same actions for it. Client, server, bare
proxy and gateway are processes of their own, on the same cores.

Protocol. A closed loop with 1 and with 8 requests in flight. Every slice of a path lies between two
slices of the direct one, and its throughput is given in theirs; where those two differ by more than
--drift the pair is left out. Ratios are medians over pairs with their quartiles; added times are
differences of a pair's quantiles. CPU ms: of the proxy, per request.

Exit codes: 0 measured, whatever the targets; 2 wrong options; 4 actions differ.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
if str(_ROOT) not in sys.path:
    sys.path.insert(0, str(_ROOT))

from benchmarks import gateway_figures as figures  # noqa: E402
from benchmarks.gateway_paths import Client, clients  # noqa: E402
from benchmarks.gateway_world import World, busy_s  # noqa: E402

LOADS = (1, 8)
PATHS = ("bare", "native", "lerobot", "openpi", "gr00t")
WARM_S = 0.3
LIMIT_S = 300.0
DIFFER = 4


class Differ(Exception):
    """Paths gave different actions for one observation."""


class Bench:
    """Robots on every path of one world."""

    def __init__(self, world: World, robots: dict[str, list[Client]]) -> None:
        self.world, self.robots = world, robots

    async def check(self) -> None:
        """Raise Differ unless all paths give the same actions for the same observation."""
        found: dict[bytes, set[str]] = {}
        for path, robots in self.robots.items():
            for robot in robots:
                found.setdefault(robot.actions(await robot.ask(check=True)), set()).add(path)
        if len(found) != 1:
            raise Differ(
                f"paths must give the same actions; got {sorted(map(sorted, found.values()))}."
            )

    async def slice(self, path: str, in_flight: int, seconds: float) -> figures.Slice:
        """Return what a path does in that time with so many robots."""
        latencies: list[float] = []
        acks: list[float] = []
        robots = self.robots[path][:in_flight]
        cpu, busy, began = self.world.cpu_s(), busy_s(), time.perf_counter()
        until = began + seconds

        async def drive(robot: Client) -> None:
            while (sent := time.perf_counter()) < until:
                await robot.ask()
                latencies.append(time.perf_counter() - sent)
                if robot.ack_s is not None:
                    acks.append(robot.ack_s)

        await asyncio.gather(*map(drive, robots))
        took = time.perf_counter() - began
        after = self.world.cpu_s()
        used = {name: after[name] - cpu[name] for name in cpu}
        foreign = max((busy_s() - busy - sum(used.values())) / took, 0.0)
        return figures.Slice(path, in_flight, took, latencies, acks, used, foreign)

    async def measure(self, rounds: int, seconds: float) -> dict[tuple[str, int], figures.Pairs]:
        found = {(p, n): figures.Pairs(p, n) for n in LOADS for p in PATHS}
        for number in range(rounds):
            for in_flight in LOADS:
                before = await self.slice("direct", in_flight, seconds)
                turn = number % len(PATHS)
                for path in (*PATHS[turn:], *PATHS[:turn]):
                    middle = await self.slice(path, in_flight, seconds)
                    after = await self.slice("direct", in_flight, seconds)
                    pair = figures.Pair(before, middle, after)
                    found[path, in_flight].pairs.append(pair)
                    before = after
            say(f"round {number + 1} of {rounds}")
        return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report; raises Differ, RuntimeError."""
    began = time.monotonic()
    with ExitStack() as stack:
        world = World(stack)
        await asyncio.sleep(2.0)  # the gateway's first probe
        robots = {
            path: await clients(path, world.ports[path], max(LOADS)) for path in ("direct", *PATHS)
        }
        bench = Bench(world, robots)
        await bench.check()
        say("all paths give the same actions")
        for path in robots:
            await bench.slice(path, max(LOADS), WARM_S)
        gc.collect()
        gc.freeze()
        found = await bench.measure(args.rounds, args.slice_s)
        await bench.check()
        for group in robots.values():
            for robot in group:
                await robot.close()
    rows = [
        figures.summary(found[path, n], args.drift, found["bare", n])
        for n in LOADS
        for path in PATHS
    ]
    direct = {n: [pair.before for p in PATHS for pair in found[p, n].pairs] for n in LOADS}
    return {
        "cores": os.cpu_count(),
        "rounds": args.rounds,
        "slice_s": args.slice_s,
        "drift": args.drift,
        "seconds": time.monotonic() - began,
        "direct": [
            {
                "in_flight": n,
                "per_second": figures.spread([one.rate for one in slices]),
                "p50_ms": 1000 * figures.quantile([s for o in slices for s in o.latencies_s], 0.5),
                "p99_ms": 1000 * figures.quantile([s for o in slices for s in o.latencies_s], 0.99),
            }
            for n, slices in direct.items()
        ],
        "paths": rows,
        "targets": figures.verdicts(rows),
    }


def show(report: dict[str, Any]) -> str:
    lines = [f"{report['cores']} cores, {report['rounds']} rounds, {report['seconds']:.0f} s"]
    for row in report["direct"]:
        rate = row["per_second"]
        lines.append(
            f"direct at {row['in_flight']}: {rate['median']:.0f} requests/s "
            f"({rate['low']:.0f} to {rate['high']:.0f}), p50 {row['p50_ms']:.2f} ms, "
            f"p99 {row['p99_ms']:.2f} ms"
        )
    lines += ["", figures.table(report["paths"]), ""]
    for row in report["targets"]:
        lines.append(
            f"{'met   ' if row['met'] else 'MISSED'} {row['target']}: {row['measured']:.2f}"
        )
    foreign = max(row["foreign_cores"] for row in report["paths"])
    lines.append(f"other programs used up to {foreign:.2f} cores (median of a path's slices)")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="default %(default)s")
    parser.add_argument("--slice-s", type=float, default=0.25, help="default %(default)s")
    parser.add_argument("--drift", type=float, default=0.25, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON")
    args = parser.parse_args(argv)
    if args.rounds < 1 or not 0.05 <= args.slice_s <= 10 or args.drift <= 0:
        parser.error("--rounds must be at least 1, --slice-s 0.05 to 10, --drift above 0")
    bound = LIMIT_S + 3 * args.rounds * args.slice_s * len(LOADS) * 2 * len(PATHS)
    try:
        report = asyncio.run(asyncio.wait_for(run(args), bound))
    except Differ as error:
        print(f"gateway.py: {error}", file=sys.stderr)
        return DIFFER
    print(json.dumps(report, indent=2) if args.json else show(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
