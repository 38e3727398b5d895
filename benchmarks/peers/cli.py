"""Options and exit codes of paired.py."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from benchmarks.peers.model import Model
from benchmarks.peers.models import MODELS
from benchmarks.peers.sides import COMMAND, ENVIRONMENTS, ROOT

USAGE, REFUSED, DIFFER, FAILED, TOO_FEW = 2, 3, 4, 5, 6


class Stop(Exception):
    """Nothing was measured; ``code`` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    own = {name for model in MODELS.values() for name in model.environments.values()}
    add(
        "--setup",
        metavar="PEER",
        choices=sorted({*ENVIRONMENTS.values(), *own}),
        help="make the environment of a peer below .peers/ and stop",
    )
    add("--python", default="python3", help="with --setup: interpreter of the environment")
    add(
        "--verify-golden",
        metavar="DIR",
        type=Path,
        help="only check that the peer reproduces the golden actions in DIR",
    )
    add("--model", choices=sorted(MODELS), default="pi05", help="plugin of our side")
    add("--ours", default="", metavar="OPTIONS", help="settings of our side, or command:...")
    add(
        "--peer",
        help=f"{', '.join(ENVIRONMENTS)}, phyai or {COMMAND}...; default: the model's first",
    )
    add(
        "--cameras",
        type=int,
        help="valid cameras, cosmos3: views on the canvas; default: 2, minicpm_robot 3, cosmos3 1",
    )
    add(
        "--tokens",
        type=int,
        help="valid prompt tokens; default: 20, gr00t_n17 24, minicpm_robot 64, cosmos3 32",
    )
    add("--peer-cameras", type=int, help="cameras the peer pads to; default: none added")
    add("--peer-tokens", type=int, help="tokens the peer pads to; default: none added")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    depth = made.add_mutually_exclusive_group()
    depth.add_argument("--layers", type=int, help="language layers on both sides")
    depth.add_argument("--depth-fraction", type=float, default=1.0, help="of the released layers")
    add("--checkpoint", type=Path, help="folder to use instead of random weights")
    add("--rows", type=int, default=1, help="batch size")
    add("--steps", type=int, help="default: 10, gr00t_n17, minicpm_robot and cosmos3 4")
    add("--threads", type=int, default=2)
    add("--seed", type=int, default=0)
    add("--pairs", type=int, default=10, help="pairs to keep")
    add("--max-pairs", type=int, help="pairs to try; default: three times --pairs")
    add("--tolerance", type=float, help="relative norm; default: 0.03 in bf16, 1e-4 in fp32")
    add("--drift-limit", type=float, default=0.10, help="of a probe over one pair")
    add("--foreign-limit", type=float, default=0.10, help="CPU time of others, in cores")
    add("--run-limit", type=float, default=600.0, help="seconds one run may take")
    add("--first-run-limit", type=float, default=3600.0, help="seconds the first run may take")
    add(
        "--wait-policy",
        choices=("passive", "default"),
        default="passive",
        help="OMP_WAIT_POLICY of the workers; passive: waiting threads never spin",
    )
    add(
        "--weights-cache",
        type=Path,
        default=ROOT / ".cache" / "paired",
        help="folder of the random weights and of exported graphs",
    )
    add("--save", type=Path, metavar="FILE", help="write the report as JSON")
    add("--markdown", type=Path, metavar="FILE", help="write the report as Markdown")
    return made  # fmt: skip


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on the model.  Raises: Stop for values that cannot work."""
    model = MODELS[args.model]
    if args.peer is None:
        args.peer = model.first_peer
    _check_peer(args, model)
    for name in ("cameras", "tokens", "steps"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(model, name))
    args.max_pairs = 3 * args.pairs if args.max_pairs is None else args.max_pairs
    for name in ("peer_cameras", "peer_tokens"):
        if getattr(args, name) is None:
            setattr(args, name, getattr(args, name.removeprefix("peer_")))
    _check_numbers(args)
    _check_padding(args, model)
    args.layers = _layers(args, model)
    return args


def _check_peer(args: argparse.Namespace, model: Model) -> None:
    if not args.peer.startswith(COMMAND) and args.peer not in model.peers:
        raise Stop(
            USAGE,
            f"--peer must be {', '.join(model.peers)} or {COMMAND}... for {model.name}; "
            f"got {args.peer!r}.",
        )


def _check_numbers(args: argparse.Namespace) -> None:
    for name in ("cameras", "tokens", "rows", "steps", "threads", "pairs", "max_pairs"):
        if getattr(args, name) < 1:
            raise Stop(USAGE, f"{_flag(name)} must be at least 1; got {getattr(args, name)}.")
    for name in ("tolerance", "run_limit", "first_run_limit", "depth_fraction"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:  # NaN is neither
            raise Stop(USAGE, f"{_flag(name)} must be a finite number above 0; got {value}.")
    for name in ("drift_limit", "foreign_limit"):
        value = getattr(args, name)
        if not 0 <= value < math.inf:
            raise Stop(USAGE, f"{_flag(name)} must be a finite number of at least 0; got {value}.")


def _check_padding(args: argparse.Namespace, model: Model) -> None:
    padded = (args.peer_cameras, args.peer_tokens)
    if padded[0] < args.cameras or padded[1] < args.tokens:
        raise Stop(USAGE, "--peer-cameras and --peer-tokens pad, so must not be below the valid.")
    if not model.pads and padded != (args.cameras, args.tokens):
        raise Stop(
            USAGE,
            f"--peer-cameras and --peer-tokens must be left out for {model.name}: its official "
            f"code pads nothing but shorter rows; got {padded[0]} and {padded[1]}.",
        )


def _layers(args: argparse.Namespace, model: Model) -> int:
    layers: int = args.layers
    if args.layers is None:
        layers = round(model.released_layers * args.depth_fraction)
    if not model.least_layers <= layers <= model.released_layers:
        raise Stop(
            USAGE,
            f"layers must be in [{model.least_layers}, {model.released_layers}]; got {layers}.",
        )
    return layers


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
