"""What batches of 1 to 16 bring the Cosmos3 policy: counted at full size, timed at a tiny one.

python benchmarks/cosmos_batches.py                    both tables
python benchmarks/cosmos_batches.py --count            the counted one alone, in a moment
python benchmarks/cosmos_batches.py --markdown FILE

Counted: operations and weights of the published request (33 frames of 480 x 832, 32 actions, 4
steps, two guidance branches) at Nano's sizes, and the least time a stated machine allows. Timed: a
small random network on the CPU; it shows the cost per call, and nothing of Nano's weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phyai import Engine, EngineArgs, EngineConfig
from phyai.cost import StageCost, Workload
from phyai.engine_config import DeviceConfig, RuntimeConfig
from phyai.models.cosmos3 import Cosmos3Config, Cosmos3PolicyArgs
from phyai.models.cosmos3.cost import EMPTY_TOKENS, PROMPT_TOKENS, Clip, Cosmos3Cost
from phyai.models.cosmos3.network.flops import TIME_FEATURES, text_flops
from phyai.profile.roofline import Machine

BATCHES = (1, 2, 4, 8, 16)
STEPS, BRANCHES, CAMERA_FRAMES = 4, 2, 33
PUBLISHED_CLIP = Clip(frames=CAMERA_FRAMES, height=480, width=832, latent=(9, 30, 52), actions=32)
TINY_CLIP = Clip(frames=CAMERA_FRAMES, height=96, width=128, latent=(9, 6, 8), actions=32)
TINY = Cosmos3Config(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    mrope_section=(4, 2, 2),
    vocab_size=512,
    latent_channel=8,
    sound_gen=False,
)
H100 = Machine("one H100 SXM by its data sheet", "bfloat16", 989e12, 3.35e12)
PUBLISHED = (
    "Published by others, not measured here: 14.3 % more throughput from batch 1 to 16 (one Hopper "
    "GPU, this request); 2.46 s with the official code and 1.18 s with two guidance ranks of four "
    "(8 x H20, one robot's request)."
)


def cost_of(config: Cosmos3Config, clip: Clip) -> Cosmos3Cost:
    """Return the cost of a policy without a state row, with requests of these sizes."""
    found = Cosmos3Cost(Cosmos3PolicyArgs(config=config, history_length=0, max_batch_size=16))
    found.clip = clip
    return found


# ---------------------------------------------------------------- counted


def counted(batches: Sequence[int], machine: Machine = H100) -> str:
    """Return the table of operations, weights and least times per batch."""
    model = cost_of(Cosmos3Config(), PUBLISHED_CLIP)
    lines = ["| batch | TFLOP a request | weights read, GB a request | operations a byte | "
             "least ms a request | throughput |",
             "|---:|---:|---:|---:|---:|---:|"]  # fmt: skip
    first = 0.0
    for rows in batches:
        stages = model.stages(Workload(tokens=PROMPT_TOKENS, steps=STEPS, rows=rows))
        flops = sum(stage.flops for stage in stages)
        weights = sum(stage.weight_bytes for stage in stages)
        ms = machine.least_ms(stages) / rows
        first = first or ms
        total = sum(stage.bytes for stage in stages)
        lines.append(
            f"| {rows} | {flops / rows / 1e12:.1f} | {weights / rows / 1e9:.1f} | "
            f"{flops / total:.0f} | {ms:.1f} | {100 * (first / ms - 1):+.1f} % |"
        )
    lines += ["", f"Machine: {machine.name}, {machine.ridge:.0f} operations a byte at its ridge."]
    return "\n".join(lines)


def pipeline_stages(model: Cosmos3Cost) -> dict[str, float]:
    """Return the operations of one request in diffusers' pipeline, by stage.

    It encodes every frame, and computes both texts, all of their last layer included, and the time
    embedding of every noisy token in each step.
    """
    config, media = model.config, model.media
    ours = model.stages(Workload(tokens=PROMPT_TOKENS, steps=STEPS), published=True)
    found = {stage.stage: stage.flops for stage in ours}
    texts = sum(text_flops(config, n, full_last=True) for n in (PROMPT_TOKENS, EMPTY_TOKENS))
    noisy = media.total - media.video // model.clip.latent[0]
    width = config.hidden_size
    per_token = 2 * width * (TIME_FEATURES + width)
    return {
        **found,
        "text": float(STEPS * texts),
        "time": float(STEPS * BRANCHES * noisy * per_token),
    }


def work() -> str:
    """Return the table of operations of one request, in ours and in diffusers' pipeline."""
    model = cost_of(Cosmos3Config(), PUBLISHED_CLIP)
    stages: Sequence[StageCost] = model.stages(Workload(tokens=PROMPT_TOKENS, steps=STEPS))
    ours = {stage.stage: stage.flops for stage in stages}
    theirs = pipeline_stages(model)
    names = list(dict.fromkeys([*ours, *theirs]))
    lines = ["| TFLOP of one request | ours | diffusers |", "|---|---:|---:|"]
    for name in names:
        lines.append(f"| {name} | {ours.get(name, 0.0) / 1e12:.1f} | {theirs[name] / 1e12:.1f} |")
    total = (sum(ours.values()) / 1e12, sum(theirs.values()) / 1e12)
    lines.append(f"| all | {total[0]:.1f} | {total[1]:.1f} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- timed


def timed(
    batches: Sequence[int],
    *,
    rounds: int,
    threads: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, list[float]]:
    """Return the seconds of one call per batch and round, of the tiny network.

    The batches take turns, so that a slow moment of the machine meets all of them.
    """
    model = cost_of(TINY, TINY_CLIP)
    config = EngineConfig(
        device=DeviceConfig(target="cpu", params_dtype="float32"),
        runtime=RuntimeConfig(num_threads=threads, memo_bytes=0),
    )
    found: dict[int, list[float]] = {rows: [] for rows in batches}
    with Engine(EngineArgs("cosmos3_policy", model.args, config)) as engine:
        requests = {rows: _request(model, rows) for rows in batches}
        for request in requests.values():
            engine.step(request)  # first calls build tables and caches
        for _ in range(rounds):
            for rows, request in requests.items():
                began = clock()
                engine.step(request)
                found[rows].append(clock() - began)
    return found


def _request(model: Cosmos3Cost, rows: int) -> Any:
    return model.request(Workload(tokens=32, steps=STEPS, rows=rows), seed=rows)


def timed_table(seconds: dict[int, list[float]]) -> str:
    """Return the table of medians; throughput relative to the first batch, round by round."""
    lines = ["| batch | ms a call | requests/s | throughput | least to most |",
             "|---:|---:|---:|---:|---:|"]  # fmt: skip
    first = next(iter(seconds))
    for rows, values in seconds.items():
        gains = [rows * a / (first * b) for a, b in zip(seconds[first], values, strict=True)]
        median = statistics.median(values)
        lines.append(
            f"| {rows} | {1e3 * median:.1f} | {rows / median:.1f} | "
            f"{statistics.median(gains):.2f}x | {min(gains):.2f} to {max(gains):.2f} |"
        )
    return "\n".join(lines)


def page(options: argparse.Namespace) -> str:
    parts = [
        "# Cosmos3 policy: batches of 1 to 16",
        PUBLISHED,
        "## Counted, at Nano's sizes",
        "The published request: 33 frames of 480 x 832 (3510 video tokens), 32 actions, 4 steps, "
        f"two branches of {PROMPT_TOKENS} and {EMPTY_TOKENS} text tokens, bfloat16.",
        counted(options.batches),
        "One request is bound by its arithmetic already, so the weights that a batch shares are "
        "not what time goes into: what a batch can bring is better use of the machine, and less "
        "time between kernels.",
        "## Counted, against diffusers' pipeline",
        work(),
    ]
    if not options.count:
        seconds = timed(options.batches, rounds=options.rounds, threads=options.threads)
        media = cost_of(TINY, TINY_CLIP).media.total
        parts += [
            "## Timed, at a tiny size",
            f"CPU, {options.threads} threads, float32, eager: {TINY.num_hidden_layers} layers of "
            f"width {TINY.hidden_size}, {media} media tokens a row and branch, 4 steps, guidance, "
            f"{options.rounds} rounds. A call of one row is mostly the cost of calling kernels.",
            timed_table(seconds),
        ]
    return "\n\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--count", action="store_true", help="time nothing")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(words)
    text = page(options)
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
