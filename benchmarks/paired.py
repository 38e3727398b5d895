"""Time our side and a peer in turns, on the same weights and inputs; refuse what is not comparable.

    python benchmarks/paired.py --setup hf
    python benchmarks/paired.py --peer hf --cameras 2 --tokens 20 --save out/hf.json

Sides. Ours is the Engine; ``--ours 'precision=bf16_lerobot'`` gives it settings. A peer is one of
hf, hf-compiled, hf-bf16-vision, openvino, lerobot, phyai (ours once more, plain, against
``--ours`` with settings), or ``command:...``. Same work: both compute
``--cameras`` and ``--tokens`` and nothing else. As deployed: ``--peer-cameras 3 --peer-tokens 200``
lets the peer pad as it is shipped; the valid inputs, and so the actions, stay the same.

Protocol. A worker reads one JSON object a line from standard input and answers each with one on
standard output: ``"ok": true`` and the fields below, or ``"ok": false``, ``error``, and where
nothing is broken ``"refused": true``. It prints nothing else there, computes only between a request
and its answer, and ends with its input.

    hello     protocol 1 -> name, versions {}, threads, computes
    estimate  checkpoint, dtype (bf16 | fp32), threads, cameras, tokens, rows, steps -> bytes
    load      the same fields, and rope_frequencies (official | float32; float32 when left out)
              -> anything worth reporting
              checkpoint: folder with model.safetensors, config.json, arch.json (released layout);
              cameras, tokens: what the side is to compute, padding included
    inputs    path, steps -> prefix_positions; compile_s when it had to compile for them
              a safetensors file: images [B, C, 3, S, S] f32 in [-1, 1], image_masks [B, C] bool,
              tokens [B, n] i64, token_mask [B, n] bool, noise [B, T, A] f32
    run       -> seconds, stages {name: seconds} (may be empty)
    result    path -> peak_rss_bytes, first_call_s; writes actions [B, T, A] f32 of the last run
    quit      ->

Exit codes: 0 measured; 2 wrong options; 3 refused (memory, environment); 4 outputs differ;
5 a worker failed; 6 too few pairs were kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # read when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # workers and tests know this folder by its package name

from benchmarks.peers import machine, pairing, report  # noqa: E402
from benchmarks.peers.equality import Equality, OutputsDiffer, compared, write_inputs  # noqa: E402
from benchmarks.peers.golden import verify  # noqa: E402
from benchmarks.peers.link import Declined, Worker, WorkerFailed  # noqa: E402
from benchmarks.peers.sizes import RELEASED_LAYERS, Sizes  # noqa: E402
from benchmarks.peers.weights import cached_checkpoint  # noqa: E402

ENVIRONMENTS = {
    "hf": "hf",
    "hf-compiled": "hf",
    "hf-bf16-vision": "hf",
    "openvino": "openvino",
    "lerobot": "lerobot",
}
COMMAND = "command:"
HELLO_FIELDS = ("name", "versions", "computes")
RUN_FIELDS = ("seconds",)
RESULT_FIELDS = ("peak_rss_bytes", "first_call_s")
USAGE, REFUSED, DIFFER, FAILED, TOO_FEW = 2, 3, 4, 5, 6
HELLO_S, LOAD_S, INPUTS_S, RESULT_S = 180.0, 3600.0, 7200.0, 60.0


class Stop(Exception):
    """Nothing was measured; ``code`` is the exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- options


def parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add(
        "--setup",
        metavar="PEER",
        choices=sorted(set(ENVIRONMENTS.values())),
        help="make the environment of a peer below .peers/ and stop",
    )
    add("--python", default="python3", help="with --setup: interpreter of the environment")
    add(
        "--verify-golden",
        metavar="DIR",
        type=Path,
        help="only check that the peer reproduces the golden actions in DIR",
    )
    add("--ours", default="", metavar="OPTIONS", help="settings of our side, or command:...")
    add("--peer", default="hf", help=f"{', '.join(ENVIRONMENTS)}, phyai or {COMMAND}...")
    add("--cameras", type=int, default=2, help="valid cameras")
    add("--tokens", type=int, default=20, help="valid prompt tokens")
    add("--peer-cameras", type=int, help="cameras the peer pads to; default: none added")
    add("--peer-tokens", type=int, help="tokens the peer pads to; default: none added")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    depth = made.add_mutually_exclusive_group()
    depth.add_argument("--layers", type=int, help="decoder layers on both sides")
    depth.add_argument("--depth-fraction", type=float, default=1.0, help="of the released layers")
    add("--checkpoint", type=Path, help="folder to use instead of random weights")
    add("--rows", type=int, default=1, help="batch size")
    add("--steps", type=int, default=10)
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
    """Raise Stop for values that cannot work."""
    for name in ("cameras", "tokens", "rows", "steps", "threads", "pairs"):
        if getattr(args, name) < 1:
            raise Stop(USAGE, f"--{name} must be at least 1; got {getattr(args, name)}.")
    args.max_pairs = args.max_pairs or 3 * args.pairs
    args.peer_cameras = args.peer_cameras or args.cameras
    args.peer_tokens = args.peer_tokens or args.tokens
    if args.peer_cameras < args.cameras or args.peer_tokens < args.tokens:
        raise Stop(USAGE, "--peer-cameras and --peer-tokens pad, so must not be below the valid.")
    layers = args.layers or round(RELEASED_LAYERS * args.depth_fraction)
    if not 1 <= layers <= RELEASED_LAYERS:
        raise Stop(USAGE, f"layers must be in [1, {RELEASED_LAYERS}]; got {layers}.")
    args.layers = layers
    return args


# ---------------------------------------------------------------- workers


def peer_command(peer: str) -> list[str]:
    """Return the command of a peer's worker.  Raises: Stop when it is unknown or not set up."""
    if peer.startswith(COMMAND):
        return shlex.split(peer.removeprefix(COMMAND))
    if peer == "phyai":
        return our_command("")
    if peer not in ENVIRONMENTS:
        raise Stop(
            USAGE, f"--peer must be {', '.join(ENVIRONMENTS)} or {COMMAND}...; got {peer!r}."
        )
    environment = ENVIRONMENTS[peer]
    python = ROOT / ".peers" / environment / "bin" / "python"
    if not python.exists():
        raise Stop(
            REFUSED,
            f"peer {peer!r} must be set up; {python.relative_to(ROOT)} does not exist. "
            f"Run: python benchmarks/paired.py --setup {environment}",
        )
    return [str(python), "-m", "benchmarks.peers.worker", peer]


def our_command(options: str) -> list[str]:
    if options.startswith(COMMAND):
        return shlex.split(options.removeprefix(COMMAND))
    return [sys.executable, "-m", "benchmarks.peers.worker", "phyai", *shlex.split(options)]


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """Return what both workers get: so many threads, and none that spins while it waits."""
    threads = str(args.threads)
    values = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    if args.wait_policy == "passive":
        values |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    return values | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def setup_environment(name: str, python: str) -> None:
    """Create ``.peers/NAME`` and install the pinned packages into it."""
    folder = ROOT / ".peers" / name
    requirements = ROOT / "benchmarks" / "peers" / f"requirements-{name}.txt"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-r", str(requirements)]
    try:
        subprocess.run([python, "-m", "venv", str(folder)], check=True, timeout=300)
        subprocess.run(pip, check=True, timeout=3600)
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise Stop(REFUSED, f"environment {name!r} must install; {error}.") from error


# ---------------------------------------------------------------- the measurement


def refuse_too_large(needed: dict[str, int], available: int) -> None:
    """Raise Stop, with how much is missing, unless both sides fit in memory at once."""
    total = sum(needed.values())
    if total > available:
        parts = " and ".join(f"{label} {n / 2**30:.1f}" for label, n in needed.items())
        raise Stop(
            REFUSED,
            f"the pair must fit in memory: {parts} GiB make {total / 2**30:.1f} GiB, available are "
            f"{available / 2**30:.1f} GiB; {(total - available) / 2**30:.1f} GiB are missing. "
            "Use --layers or --depth-fraction, or end other programs.",
        )


def start(stack: ExitStack, args: argparse.Namespace) -> tuple[Worker, Worker]:
    """Start both workers; they end with the stack."""
    values = environment_of(args)
    commands = {"ours": our_command(args.ours), "peer": peer_command(args.peer)}
    ours, peer = (
        stack.enter_context(Worker(label, command, environment=values, cwd=ROOT))
        for label, command in commands.items()
    )
    return ours, peer


Sides = dict[str, dict[str, Any]]


def measure(args: argparse.Namespace, probe_of: Callable[[int], pairing.Probe]) -> dict[str, Any]:
    """Return the report.  Raises: Stop, WorkerFailed, OutputsDiffer."""
    conditions = machine.conditions()
    rules = pairing.Rules(
        args.pairs, args.max_pairs, args.drift_limit, args.foreign_limit, args.run_limit
    )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paired.")))
        ours, peer = start(stack, args)
        about: Sides = {
            w.label: w.ask("hello", HELLO_S, HELLO_FIELDS, protocol=1) for w in (ours, peer)
        }
        args.weights_cache.mkdir(parents=True, exist_ok=True)
        checkpoint = args.checkpoint or cached_checkpoint(
            args.weights_cache, Sizes.of_depth(args.layers), args.seed, say
        )
        sizes = Sizes.from_folder(checkpoint)
        inputs = scratch / "inputs.safetensors"
        write_inputs(inputs, sizes, args.cameras, args.tokens, args.rows, args.seed)
        load((ours, peer), about, setups(args, checkpoint), inputs)
        for worker in (ours, peer):
            worker.ask("run", args.first_run_limit, RUN_FIELDS)
        equal = agree(ours, peer, about, scratch, args)
        say(f"actions agree to {equal.relative:.2e} (limit {equal.tolerance:g})")
        for worker in (ours, peer):  # the second call may still be finding its feet
            worker.ask("run", args.run_limit)
        sessions = (ours.session, peer.session)
        measured = pairing.measure(
            ours, peer, rules, probe_of(args.threads), lambda: machine.cpu_sample(sessions), say
        )
        agree(ours, peer, about, scratch, args)  # still, and with the final peak RSS
        for worker in (ours, peer):
            worker.ask("quit", RESULT_S)
    return {
        "conditions": conditions,
        "request": _request(args, sizes),
        **about,
        "equality": asdict(equal),
        "rules": asdict(rules),
        "result": (result := report.summary(measured)),
        "void": _void(about["peer"], args, sizes, result),
    }


def setups(args: argparse.Namespace, checkpoint: Path) -> Sides:
    """Return what each side is told to load."""
    both = {
        "checkpoint": str(checkpoint.resolve()), "dtype": args.dtype, "threads": args.threads,
        "rows": args.rows, "steps": args.steps, "cache": str(args.weights_cache.resolve()),
    }  # fmt: skip
    return {
        "ours": {**both, "cameras": args.cameras, "tokens": args.tokens},
        "peer": {**both, "cameras": args.peer_cameras, "tokens": args.peer_tokens},
    }


def load(workers: tuple[Worker, ...], about: Sides, told: Sides, inputs: Path) -> None:
    """Load every side, if all fit in memory together; adds what they say to ``about``."""
    for worker in workers:
        reply = worker.ask("estimate", HELLO_S, ("bytes",), **told[worker.label])
        about[worker.label]["estimated_bytes"] = int(reply["bytes"])
    needed = {label: side["estimated_bytes"] for label, side in about.items()}
    refuse_too_large(needed, machine.available_bytes())
    for worker in workers:
        side, settings = about[worker.label], told[worker.label]
        say(f"loading {side['name']}")
        loaded = worker.ask("load", LOAD_S, **settings)
        taken = worker.ask(
            "inputs", INPUTS_S, ("prefix_positions",), path=str(inputs), steps=settings["steps"]
        )
        seconds = loaded.pop("seconds", 0.0) + taken.pop("compile_s", 0.0)
        side.update(load_s=seconds, loaded=loaded, **taken)


def agree(
    ours: Worker, peer: Worker, about: Sides, scratch: Path, args: argparse.Namespace
) -> Equality:
    """Compare the actions of the last runs, and note peak RSS and first call of both sides."""
    results = []
    for worker in (ours, peer):
        results.append(scratch / f"{worker.label}.safetensors")
        reply = worker.ask("result", RESULT_S, RESULT_FIELDS, path=str(results[-1]))
        about[worker.label].update({name: reply[name] for name in RESULT_FIELDS})
    inputs = scratch / "inputs.safetensors"
    return compared(results[0], results[1], inputs, args.dtype, args.tolerance)


def _request(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    names = ("dtype", "cameras", "tokens", "peer_cameras", "peer_tokens", "rows", "steps",
             "threads", "seed", "ours", "wait_policy")  # fmt: skip
    layers = {
        "layers": sizes.text.num_hidden_layers,
        "vision_layers": sizes.vision.num_hidden_layers,
    }
    return {name: getattr(args, name) for name in names} | layers


def _void(
    peer: dict[str, Any], args: argparse.Namespace, sizes: Sizes, result: dict[str, Any]
) -> list[str]:
    """Return why the ratio does not stand: the official re-coding must share its time alike."""
    full = sizes == Sizes() and args.dtype == "bf16" and args.peer == "hf" and args.rows == 1
    if not full or peer["prefix_positions"] != sizes.positions(3, 200) or not result["pairs"]:
        return []
    return report.share_problems(result["peer_stages_s"])


# ---------------------------------------------------------------- main


def run(argv: list[str], probe_of: Callable[[int], pairing.Probe] = machine.SpeedProbe) -> int:
    """Return the exit code; every child has ended by then.

    probe_of: makes the probe for a number of threads.
    """
    args = parser().parse_args(argv)
    try:
        if args.setup:
            setup_environment(args.setup, args.python)
            return 0
        args = checked(args)
        if args.verify_golden is not None:
            values = environment_of(args)
            with Worker("peer", peer_command(args.peer), environment=values, cwd=ROOT) as worker:
                return 0 if verify(worker, args.verify_golden, args.threads, print) else DIFFER
        result = measure(args, probe_of)
    except Stop as stop:
        say(str(stop))
        return stop.code
    except OutputsDiffer as differ:
        say(str(differ))
        return DIFFER
    except WorkerFailed as failed:
        say(str(failed))
        return REFUSED if isinstance(failed, Declined) else FAILED
    except OSError as error:
        say(f"{error}")
        return REFUSED
    text = report.markdown(result)
    print(text)  # first: what was measured must not get lost with a file that cannot be written
    for path, content in ((args.save, json.dumps(result, indent=1) + "\n"), (args.markdown, text)):
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            except OSError as error:
                say(f"the report must be writable; got {error}. It is printed above.")
                return USAGE
    if result["result"]["pairs"] < args.pairs:
        say(f"{args.pairs} pairs must be kept; got {result['result']['pairs']}.")
        return TOO_FEW
    return 0


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _stop(number: int, *_: object) -> NoReturn:
    for one in SIGNALS:  # a second one must not interrupt the end of the workers
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for one in SIGNALS:  # so that the workers end with us
        signal.signal(one, _stop)
    sys.exit(run(sys.argv[1:]))
