"""Makes the tables and pictures of docs/performance.md: operations, control rates, paired times.

python benchmarks/figures.py            print the tables
python benchmarks/figures.py --write    also draw docs/pictures/*.png and renew the page's tables
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from phyai.cost import Workload, flop_shares, total_flops
from phyai.models.pi05.main_pi05 import PI05Args, cost
from phyai.profile.roofline import ControlTime, Machine

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "performance.md"
PUBLISHED = Workload(cameras=3, tokens=16, steps=10)
WORKLOADS = (PUBLISHED, Workload(cameras=3, tokens=200, steps=10),
             Workload(cameras=2, tokens=20, steps=10))  # fmt: skip
LEAST_PAIRS = 10
CONTROL = (
    ("LIBERO spatial", ControlTime(inference_ms=3.79, environment_ms=23.42)),
    ("Cosmos3 policy", ControlTime(inference_ms=254.0, environment_ms=20.0)),
)
AMX = Machine("two AMX cores", "bfloat16", flops_per_s=7e12, bytes_per_s=29e9)


def operations() -> str:
    """Return the table of operations of pi0.5 by both accounts."""
    model = cost(PI05Args())
    lines = ["| request | account | vision | prefix | loop | total (TFLOP) | loop's share |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for work in WORKLOADS:
        for name, published in (("published", True), ("computed", False)):
            stages = model.stages(work, published=published)
            cells = [f"{stage.flops / 1e12:.4f}" for stage in stages]
            share = flop_shares(stages)["loop"]
            request = f"{work.cameras} cameras, {work.tokens} tokens"
            total = total_flops(stages) / 1e12
            lines.append(
                f"| {request} | {name} | {' | '.join(cells)} | {total:.4f} | {share:.2%} |"
            )
    return "\n".join(lines)


def bounds() -> str:
    """Return the least time of pi0.5 on a machine of two AMX cores."""
    model = cost(PI05Args())
    lines = ["| request | vision | prefix | loop | at least (s) |", "|---|---|---|---|---:|"]
    for work in WORKLOADS[1:]:
        stages = model.stages(work)
        cells = [
            f"{AMX.least_ms([s]) / 1e3:.2f} ({AMX.bound_of(s.flops, s.bytes)})" for s in stages
        ]
        request = f"{work.cameras} cameras, {work.tokens} tokens"
        lines.append(f"| {request} | {' | '.join(cells)} | {AMX.least_ms(stages) / 1e3:.2f} |")
    return "\n".join(lines)


def control() -> str:
    """Return the table of published control-time cases."""
    lines = ["| case | inference per action | environment | one after the other | overlapped "
             "| verdict | faster inference brings at most |",
             "|---|---:|---:|---:|---:|---|---:|"]  # fmt: skip
    for name, c in CONTROL:
        gain = f"{c.largest_gain:.0%}" if c.largest_gain < 2 else f"{1 + c.largest_gain:.1f}x"
        lines.append(
            f"| {name} | {c.call_ms / c.horizon:g} ms | {c.environment_ms:g} ms "
            f"| {c.synchronous_hz:.2f} Hz | {c.overlapped_hz:.2f} Hz | {c.verdict} | {gain} |"
        )
    return "\n".join(lines)


def speed() -> str:
    """Return the table of paired measurements in docs/reports/speed."""
    lines = ["| measurement | dtype | layers | positions, ours / peer | pairs | ratio (min to max) "
             "| ours (s) | peer (s) | peak RSS, ours / peer (GB) |",
             "|---|---|---:|---|---:|---:|---:|---:|---|"]  # fmt: skip
    for path in sorted((DOCS / "reports" / "speed").glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if "equality" not in report or not report["result"]["pairs"]:
            continue  # a sweep, or nothing was kept
        result, (ours, peer) = report["result"], (report["ours"], report["peer"])
        ratio = result["ratio"]
        few = result["pairs"] < LEAST_PAIRS
        marks = " (void)" * bool(report["void"]) + " (few pairs)" * few
        name = f"[{path.stem}](reports/speed/{path.stem}.md){marks}"
        lines.append(
            f"| {name} | {report['request']['dtype']} | {report['request']['layers']} "
            f"| {ours['prefix_positions']} / {peer['prefix_positions']} | {result['pairs']} "
            f"| {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) "
            f"| {result['ours_s']['median']:.1f} | {result['peer_s']['median']:.1f} "
            f"| {ours['peak_rss_bytes'] / 1e9:.1f} / {peer['peak_rss_bytes'] / 1e9:.1f} |"
        )
    return "\n".join(lines)


TABLES = {"operations": operations, "bounds": bounds, "control": control, "speed": speed}


def renewed(page: str) -> str:
    """Return the page with each table between its marks replaced."""
    for name, make in TABLES.items():
        start, end, table = f"<!-- {name} -->\n", f"<!-- /{name} -->", make()
        page, found = re.subn(f"{start}.*?{end}", f"{start}{table}\n{end}", page, flags=re.S)
        if found != 1:
            raise SystemExit(f"{PAGE.name} must have one table {name!r}; got {found}.")
    return page


def draw() -> None:
    from phyai.profile.plots import plot_control, plot_shares

    model = cost(PI05Args())
    groups = [
        (
            f"{work.cameras} cameras, {work.tokens} tokens",
            [
                ("published", flop_shares(model.stages(work, published=True))),
                ("computed", flop_shares(model.stages(work))),
            ],
        )
        for work in WORKLOADS
    ]
    plot_shares(groups, DOCS / "pictures/operations.png", "pi0.5, 10 steps: operations by stage")
    plot_control(CONTROL, DOCS / "pictures/control_time.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="renew the page and its pictures")
    if parser.parse_args().write:
        PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        draw()
    for name, make in TABLES.items():
        print(f"{name}\n{make()}\n")


if __name__ == "__main__":
    main()
