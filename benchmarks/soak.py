"""Runs the measurements behind docs/performance.md, one after the other; hours on a small machine.

python benchmarks/soak.py --list                     the names and their commands
python benchmarks/soak.py --only same-532 curve      some of them
python benchmarks/soak.py --pairs 10                 all of them

Each writes docs/reports/speed/NAME.json and .md with its conditions; ``figures.py --write`` puts
them into the page. A measurement that is refused here (memory, instructions) is passed over; the
names and exit codes go to docs/reports/speed/refused.md.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "docs" / "reports" / "speed"
FULL = ("--cameras", "3", "--tokens", "200")
SHORT = ("--cameras", "2", "--tokens", "20")
DEPLOYED = (*SHORT, "--peer-cameras", "3", "--peer-tokens", "200")
WORK = {"same-968": FULL, "same-532": SHORT, "deployed": DEPLOYED}
PROMPT = ("--tokens", "24")
VIEWS = ("--tokens", "64")
MODELS = {
    "pi0-same": ("--model", "pi0", *SHORT),
    "groot-same-1cam": ("--model", "gr00t_n17", "--cameras", "1", *PROMPT),
    "groot-same-2cam": ("--model", "gr00t_n17", "--cameras", "2", *PROMPT),
    "minicpm-same-3cam": ("--model", "minicpm_robot", "--cameras", "3", *VIEWS),
    "minicpm-same-2cam": ("--model", "minicpm_robot", "--cameras", "2", *VIEWS),
}
COSMOS = {
    "cosmos-policy": ("--model", "cosmos3_policy"),
    "cosmos-policy-remembered": ("--model", "cosmos3_policy", "--ours", "remember=true"),
    "cosmos-video": ("--model", "cosmos3"),
}
MIDDLE = ("--dtype", "fp32", "--layers", "4")
HALF = ("--dtype", "fp32", "--depth-fraction", "0.5")
REFUSED = 3  # exit code of paired.py
INT8 = "benchmarks/policies/int8.yaml"


@dataclass(frozen=True)
class Measurement:
    """One command; ``paired`` ones compare two sides in turns."""

    name: str
    arguments: tuple[str, ...]
    paired: bool = True

    def command(self, pairs: int) -> list[str]:
        report = REPORTS / self.name
        if not self.paired:
            phyai = str(Path(sys.executable).with_name("phyai"))
            return [phyai, *self.arguments, "--save", f"{report}.json"]
        script = str(ROOT / "benchmarks" / "paired.py")
        out = ("--save", f"{report}.json", "--markdown", f"{report}.md", "--pairs", str(pairs))
        return [sys.executable, script, *self.arguments, *out]


def measurements() -> list[Measurement]:
    """Return every measurement, the most telling ones first."""
    found = [Measurement(f"hf-{name}", ("--peer", "hf", *work)) for name, work in WORK.items()]
    found += [
        Measurement(f"hf-fp32-{name}", ("--peer", "hf", *HALF, *work))
        for name, work in WORK.items()
    ]
    for dtype in ("bf16", "fp32"):
        depth = HALF if dtype == "fp32" else ()
        found += [
            Measurement(f"openvino-{dtype}-{name}", ("--peer", "openvino", *depth, *work))
            for name, work in WORK.items()
        ]
    found += [
        Measurement(f"hf-bf16-vision-{name}", ("--peer", "hf-bf16-vision", *work))
        for name, work in WORK.items()
        if name != "same-532"
    ]
    found += [
        Measurement(
            f"int8-{name}",
            ("--peer", "phyai", "--ours",
             f"config.kernel.config_path={INT8} embedding_in_file=true", "--tolerance", "0.1",
             *work),
        )
        for name, work in WORK.items()
        if name != "deployed"
    ]  # fmt: skip
    for dtype, depth in (("bf16", ()), ("fp32", HALF)):
        found += [
            Measurement(_named(name, dtype), ("--peer", "hf", *depth, *options))
            for name, options in MODELS.items()
        ]
    found.append(
        Measurement("groot-kv-cache-2cam", ("--peer", "hf-kv-cache", *MODELS["groot-same-2cam"]))
    )
    found.append(
        Measurement("minicpm-sdpa-3cam", ("--peer", "hf-sdpa", *MODELS["minicpm-same-3cam"]))
    )
    found += [Measurement(f"{name}-fp32", (*options, *MIDDLE)) for name, options in COSMOS.items()]
    sweep = ("bench", "--plugin", "pi05", "--preset", "full-random", *SHORT, "--batch", "1,2,4,8",
             "--repeat", "5", "--set", "config.runtime.num_threads=2")  # fmt: skip
    found.append(Measurement("curve", sweep, paired=False))
    return found


def _named(name: str, dtype: str) -> str:
    return name if dtype == "bf16" else f"{name}-{dtype}"


def main() -> int:
    """Run what was asked for; return 1 when something failed for another reason than a refusal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="only print the commands")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--pairs", type=int, default=10)
    args = parser.parse_args()
    known = {m.name: m for m in measurements()}
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only takes {', '.join(known)}; got {', '.join(unknown)}")
    chosen = [known[name] for name in args.only] or list(known.values())
    REPORTS.mkdir(parents=True, exist_ok=True)
    failed, refused = False, []
    for measurement in chosen:
        command = measurement.command(args.pairs)
        if args.list:
            print(f"{measurement.name}: {' '.join(command)}")
            continue
        print(f"== {measurement.name}", flush=True)
        code = subprocess.run(command, check=False, cwd=ROOT).returncode
        if code:
            print(f"== {measurement.name} ended with {code}", flush=True)
            refused.append(f"- {measurement.name}: exit code {code}")
            failed = failed or code != REFUSED
    if refused:
        told = "Not measured in the last run of benchmarks/soak.py; exit codes: paired.py --help."
        (REPORTS / "refused.md").write_text("\n".join([told, "", *refused, ""]), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
