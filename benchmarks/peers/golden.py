"""Whether a worker reproduces the actions of the golden cases of pi0.5."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.equality import INPUTS, relative
from benchmarks.peers.link import Worker, WorkerFailed
from safetensors import safe_open
from safetensors.torch import load_file, save_file

ATOL_FP32 = 5e-5
REL_BF16 = 0.02
"""Twice what bfloat16 itself costs on these cases; another CPU rounds its products otherwise."""
LIMIT_S = 600.0


def verify(worker: Worker, folder: Path, threads: int, say: Callable[[str], None]) -> bool:
    """Run every plain case of a golden set and say how far each is; True when all are near enough.

    Raises: WorkerFailed when there is no case, or the worker cannot run one.
    """
    cases = sorted(folder.glob("case_b*.safetensors"))
    if not cases:
        raise WorkerFailed(f"golden folder {folder} must hold case_b*.safetensors; got none.")
    worker.ask("hello", LIMIT_S, protocol=1)
    good = True
    with tempfile.TemporaryDirectory(prefix="golden.") as scratch:
        for case in cases:
            near, text = _case(worker, case, Path(scratch), threads)
            good &= near
            say(f"{case.name}: {text}{'' if near else '  TOO FAR'}")
    return good


def _case(worker: Worker, case: Path, scratch: Path, threads: int) -> tuple[bool, str]:
    with safe_open(case, framework="pt") as file:
        meta = file.metadata()
    steps = int(meta["num_steps"])
    tensors = load_file(case)
    inputs = {name: tensors[f"in.{name}"].contiguous() for name in INPUTS}
    paths = {name: str(scratch / f"{name}.safetensors") for name in ("inputs", "result")}
    save_file(inputs, paths["inputs"])
    narrow = meta["dtype"].startswith("bfloat16")
    rows, cameras = inputs["image_masks"].shape
    worker.ask(
        "load", LIMIT_S, checkpoint=str(case.parent.resolve()), dtype="bf16" if narrow else "fp32",
        threads=threads, cameras=cameras, tokens=inputs["tokens"].shape[1], rows=rows, steps=steps,
        rope_frequencies="official", cache=str(scratch),
    )  # fmt: skip
    worker.ask("inputs", LIMIT_S, path=paths["inputs"], steps=steps)
    worker.ask("run", LIMIT_S)
    worker.ask("result", LIMIT_S, path=paths["result"])
    actions, wanted = load_file(paths["result"])["actions"], tensors["actions"]
    if narrow:
        distance = relative(actions.double(), wanted.double())
        return distance <= REL_BF16, f"relative norm {distance:.2e} (limit {REL_BF16:g})"
    most = float((actions - wanted).abs().max())
    return most <= ATOL_FP32, f"largest difference {most:.1e} (limit {ATOL_FP32:g})"
