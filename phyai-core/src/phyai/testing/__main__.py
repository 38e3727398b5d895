"""`python -m phyai.testing ID`: the conformance kit without the author's class."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phyai.errors import PhyaiError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code: 0 passed, 1 failed, 2 wrong usage."""
    options = _parser().parse_args(argv)
    try:
        return _run(options)
    except PhyaiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m phyai.testing",
        description="Check that an adapter plugin keeps the contract: 0 package, 1 load, "
        "2 numerics, 3 serving.",
    )
    parser.add_argument("plugin", metavar="ID", help="plugin id, or dist:id")
    parser.add_argument("--level", type=int, choices=range(4), default=3, help="highest level")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("--preset", metavar="NAME", help="preset of the manifest (the first one)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="instead of a preset's")
    parser.add_argument("--golden-dir", type=Path, metavar="DIR", help="folder of golden cases")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        choices=("recorded", "inductor", "cuda"),
        help="graph back end to compare with eager (recorded and cuda); repeatable",
    )
    parser.add_argument(
        "--only", action="append", metavar="GLOB", help="checks by name; repeatable"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    for name in ("checkpoint", "golden_dir"):
        folder = getattr(options, name)
        if folder is not None and not folder.is_dir():
            flag = name.replace("_", "-")
            print(f"error: --{flag} must name a folder; got {str(folder)!r}.", file=sys.stderr)
            return 2
    if options.json is not None and not options.json.absolute().parent.is_dir():
        print(f"error: --json must be in a folder; got {str(options.json)!r}.", file=sys.stderr)
        return 2
    print("importing torch", file=sys.stderr)
    from phyai.testing.conformance import report
    from phyai.testing.conformance.check import Outcome
    from phyai.testing.conformance.subject import Given, Subject

    more: dict[str, Any] = {"backends": tuple(options.backend)} if options.backend else {}
    subject = Subject(
        Given(
            options.plugin,
            tiny_checkpoint=options.checkpoint,
            golden_dir=options.golden_dir,
            preset=options.preset,
            **more,
        )
    )
    levels: list[int] = []

    def show(outcome: Outcome) -> None:
        if outcome.level not in levels:
            levels.append(outcome.level)
            print(report.heading(outcome.level))
        print(report.line(outcome), flush=True)

    try:
        only = options.only or ["*"]
        outcomes = report.run_checks(subject, level=options.level, only=only, done=show)
        if not outcomes:
            print(f"error: --only must match a check; got {only}.", file=sys.stderr)
            return 2
        print(report.summary(outcomes))
        if options.json is not None:
            text = json.dumps(report.as_json(subject, options.level, outcomes), indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")
    finally:
        subject.close()
    return 0 if report.all_passed(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
