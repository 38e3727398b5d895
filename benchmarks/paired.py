"""Time our side and a peer in turns, on the same weights and inputs; refuse what is not comparable.

    python benchmarks/paired.py --setup hf
    python benchmarks/paired.py --peer hf --cameras 2 --tokens 20 --save out/hf.json
    python benchmarks/paired.py --model gr00t_n17 --cameras 1
    python benchmarks/paired.py --model minicpm_robot --cameras 3
    python benchmarks/paired.py --model cosmos3_policy --layers 4 --dtype fp32

Models. pi05, pi0, gr00t_n17, minicpm_robot, cosmos3_policy and cosmos3, at the released sizes with
random weights.

Sides. Ours is the Engine; ``--ours 'precision=bf16_lerobot'`` gives it settings. A peer is one of
the model's (pi05: hf, hf-compiled, hf-bf16-vision, openvino, lerobot; pi0: the hf ones; gr00t_n17:
hf, hf-kv-cache; minicpm_robot: hf, hf-sdpa; cosmos3 and its policy: diffusers), or phyai (ours once
more, plain, against ``--ours`` with settings), or ``command:...``. Same work: both compute
``--cameras`` and ``--tokens`` and nothing else. As deployed: ``--peer-cameras 3 --peer-tokens 200``
lets the peer pad as it is shipped; the valid inputs, and so the actions, stay the same. gr00t_n17
and minicpm_robot pad nothing at batch 1. Their tokens are those outside the images, of 256 x 256
and 448 x 448 pixels.

Protocol. A worker reads one JSON object a line from standard input and answers each with one on
standard output: ``"ok": true`` and the fields below, or ``"ok": false``, ``error``, and where
nothing is broken ``"refused": true``. It prints nothing else there, computes only between a request
and its answer, and ends with its input. Numbers are finite; seconds of a run are above 0.

    hello     protocol 1, model -> name, versions {}, threads, computes
    estimate  checkpoint, dtype (bf16 | fp32), threads, cameras, tokens, rows, steps -> bytes
    load      the same fields, and rope_frequencies (official | float32; float32 when left out)
              -> anything worth reporting
              checkpoint: folder with model.safetensors, config.json, and arch.json (pi0, pi05) or
              qwen3_vl_config.json (gr00t_n17), or no other (minicpm_robot): the released layout;
              that of Cosmos3 has folders: transformer, vae, scheduler
              cameras, tokens: what the side is to compute, padding included
    inputs    path, steps -> prefix_positions; compile_s when it had to compile for them
              a safetensors file: noise [B, T, A] f32, and
              pi0, pi05: images [B, C, 3, S, S] f32 in [-1, 1], image_masks [B, C] bool,
              tokens [B, n] i64, token_mask [B, n] bool, state [B, D] f32 (pi0)
              gr00t_n17: pixel_values [patches, 1536] f32, image_grid_thw [images, 3] i64,
              input_ids and attention_mask [B, S] i64, state [B, H, D] f32, embodiment_id [B] i64
              minicpm_robot: pixel_values [1, C, p, p patches] f32, target_sizes [images, 2] i32,
              input_ids [B, S] i64, state [B, D] f32, embodiment_id [B] i64; a golden
              case may have vl_embs [B, S, F] f32 for the first three, or no noise, and the
              result is what the head would read
              cosmos3, cosmos3_policy: fields as in benchmarks/peers/cosmos/batch.py
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
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # read when torch is imported
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_ROOT = Path(__file__).resolve().parents[1]
if str(_ROOT) not in sys.path:
    sys.path.insert(0, str(_ROOT))  # workers and tests know this folder by its package name

import torch  # noqa: E402
from benchmarks.peers import machine, pairing, report, sides  # noqa: E402
from benchmarks.peers.cli import (  # noqa: E402
    DIFFER,
    FAILED,
    REFUSED,
    TOO_FEW,
    USAGE,
    Stop,
    checked,
    parser,
)
from benchmarks.peers.equality import Equality, OutputsDiffer, compared  # noqa: E402
from benchmarks.peers.golden import verify  # noqa: E402
from benchmarks.peers.link import Declined, Worker, WorkerFailed  # noqa: E402
from benchmarks.peers.model import Model, Sizes  # noqa: E402
from benchmarks.peers.models import MODELS  # noqa: E402
from benchmarks.peers.weights import cached_checkpoint  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

HELLO_S, LOAD_S, INPUTS_S, RESULT_S = 180.0, 3600.0, 7200.0, 60.0
RESULT_FIELDS = ("peak_rss_bytes", "first_call_s")

Facts = dict[str, dict[str, Any]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
    values = sides.environment_of(args)
    own = MODELS[args.model].environments
    commands = {
        "ours": sides.our_command(args.ours),
        "peer": sides.peer_command(args.peer, own),
    }
    ours, peer = (
        stack.enter_context(Worker(label, command, environment=values, cwd=sides.ROOT))
        for label, command in commands.items()
    )
    return ours, peer


def measure(args: argparse.Namespace, probe_of: Callable[[int], pairing.Probe]) -> dict[str, Any]:
    """Return the report.  Raises: Stop, NotSetUp, WorkerFailed, OutputsDiffer."""
    conditions, model = machine.conditions(), MODELS[args.model]
    rules = pairing.Rules(
        args.pairs, args.max_pairs, args.drift_limit, args.foreign_limit, args.run_limit
    )
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paired.")))
        workers = start(stack, args)
        about: Facts = {
            worker.label: worker.ask("hello", HELLO_S, protocol=1, model=model.name)
            for worker in workers
        }
        args.weights_cache.mkdir(parents=True, exist_ok=True)
        checkpoint = args.checkpoint or cached_checkpoint(
            args.weights_cache, model.name, model.of_depth(args.layers), args.seed, say
        )
        sizes = model.from_folder(checkpoint)
        inputs = scratch / "inputs.safetensors"
        random = torch.Generator().manual_seed(args.seed)
        save_file(sizes.inputs(args.cameras, args.tokens, args.rows, random), inputs)
        load(workers, about, setups(args, checkpoint), inputs)
        for worker in workers:
            worker.ask("run", args.first_run_limit)
        equal = agree(workers, about, scratch, args)
        say(f"actions agree to {equal.relative:.2e} (limit {equal.tolerance:g})")
        for worker in workers:  # the second call may still be finding its feet
            worker.ask("run", args.run_limit)
        sessions = [worker.session for worker in workers]
        measured = pairing.measure(
            *workers, rules, probe_of(args.threads), lambda: machine.cpu_sample(sessions), say
        )
        agree(workers, about, scratch, args)  # still, and with the final peak RSS
        for worker in workers:
            worker.ask("quit", RESULT_S)
    return {
        "conditions": conditions,
        "request": _request(args, sizes),
        **about,
        "equality": asdict(equal),
        "rules": asdict(rules),
        "result": (result := report.summary(measured)),
        "void": _void(about["peer"], args, model, sizes, result),
    }


def setups(args: argparse.Namespace, checkpoint: Path) -> Facts:
    """Return what each side is told to load."""
    both = {
        "checkpoint": str(checkpoint.resolve()), "dtype": args.dtype, "threads": args.threads,
        "rows": args.rows, "steps": args.steps, "cache": str(args.weights_cache.resolve()),
    }  # fmt: skip
    return {
        "ours": {**both, "cameras": args.cameras, "tokens": args.tokens},
        "peer": {**both, "cameras": args.peer_cameras, "tokens": args.peer_tokens},
    }


def load(workers: tuple[Worker, ...], about: Facts, told: Facts, inputs: Path) -> None:
    """Load every side, if all fit in memory together; adds what they say to ``about``."""
    for worker in workers:
        reply = worker.ask("estimate", HELLO_S, **told[worker.label])
        about[worker.label]["estimated_bytes"] = int(reply["bytes"])
    needed = {label: side["estimated_bytes"] for label, side in about.items()}
    refuse_too_large(needed, machine.available_bytes())
    for worker in workers:
        side, settings = about[worker.label], told[worker.label]
        say(f"loading {side['name']}")
        loaded = worker.ask("load", LOAD_S, **settings)
        taken = worker.ask("inputs", INPUTS_S, path=str(inputs), steps=settings["steps"])
        seconds = loaded.pop("seconds", 0.0) + taken.pop("compile_s", 0.0)
        side.update(load_s=seconds, loaded=loaded, **taken)


def agree(
    workers: tuple[Worker, Worker], about: Facts, scratch: Path, args: argparse.Namespace
) -> Equality:
    """Compare the actions of the last runs, and note peak RSS and first call of both sides."""
    results = []
    for worker in workers:
        results.append(scratch / f"{worker.label}.safetensors")
        reply = worker.ask("result", RESULT_S, path=str(results[-1]))
        about[worker.label].update({name: reply[name] for name in RESULT_FIELDS})
    inputs = scratch / "inputs.safetensors"
    return compared(results[0], results[1], inputs, args.dtype, args.tolerance)


def _request(args: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    names = ("model", "dtype", "cameras", "tokens", "peer_cameras", "peer_tokens", "rows", "steps",
             "threads", "seed", "ours", "wait_policy")  # fmt: skip
    layers = {"layers": sizes.layers, "vision_layers": sizes.vision_layers}
    return {name: getattr(args, name) for name in names} | layers


def _void(
    peer: dict[str, Any],
    args: argparse.Namespace,
    model: Model,
    sizes: Sizes,
    result: dict[str, Any],
) -> list[str]:
    """Return why the ratio does not stand: the official re-coding must share its time alike."""
    full = sizes == model.of_depth(model.released_layers)
    if model.shares is None or not full or not result["pairs"]:
        return []
    official = args.dtype == "bf16" and args.peer == "hf" and args.rows == 1
    if not official or peer["prefix_positions"] != model.shares.positions:
        return []
    return report.share_problems(result["peer_stages_s"], model.shares.stages)


def run(argv: list[str], probe_of: Callable[[int], pairing.Probe] = machine.SpeedProbe) -> int:
    """Return the exit code; every child has ended by then.

    probe_of: makes the probe for a number of threads.
    """
    assert __doc__ is not None
    args = parser(__doc__).parse_args(argv)
    try:
        if args.setup:
            sides.setup_environment(args.setup, args.python)
            return 0
        args = checked(args)
        if args.verify_golden is not None:
            return _verify(args)
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
    except (sides.NotSetUp, OSError) as error:
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


def _verify(args: argparse.Namespace) -> int:
    model, values = MODELS[args.model], sides.environment_of(args)
    command = sides.peer_command(args.peer, model.environments)
    with Worker("peer", command, environment=values, cwd=sides.ROOT) as worker:
        good = verify(worker, model, args.verify_golden, args.threads, print)
    return 0 if good else DIFFER


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def _stop(number: int, *_: object) -> NoReturn:
    for one in SIGNALS:  # a second one must not interrupt the end of the workers
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for one in SIGNALS:  # so that the workers end with us
        signal.signal(one, _stop)
    sys.exit(run(sys.argv[1:]))
