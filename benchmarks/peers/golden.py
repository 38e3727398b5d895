"""Whether a worker reproduces the actions of a model's golden cases."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.equality import relative
from benchmarks.peers.link import Worker, WorkerFailed
from benchmarks.peers.model import GoldenCase, Model
from safetensors.torch import load_file, save_file

LIMIT_S = 600.0


def verify(
    worker: Worker, model: Model, folder: Path, threads: int, say: Callable[[str], None]
) -> bool:
    """Run every case of a golden set and say how far each is; True when all are near enough.

    Raises: WorkerFailed when there is no case, or the worker cannot run one.
    """
    files = sorted(folder.glob(model.golden_files))
    cases = [(path, model.golden_cases(path)) for path in files]
    if not any(checks for _, checks in cases):
        raise WorkerFailed(
            f"golden folder {folder} must hold {model.golden_files}; got none that can be run."
        )
    worker.ask("hello", LIMIT_S, protocol=1, model=model.name)
    good = True
    with tempfile.TemporaryDirectory(prefix="golden.") as scratch:
        for path, checks in cases:
            if not checks:
                say(f"{path.name}: not run, the wiring leaves out what it shows")
            for case in checks:
                distance = _distance(worker, case, folder, Path(scratch), threads)
                near = distance <= case.limit  # false for NaN
                good &= near
                kind = "relative norm" if case.measure == "norm" else "largest difference"
                say(
                    f"{path.name} {case.dtype}: {kind} {distance:.1e} (limit {case.limit:g})"
                    f"{'' if near else '  TOO FAR'}"
                )
    return good


def _distance(worker: Worker, case: GoldenCase, folder: Path, scratch: Path, threads: int) -> float:
    paths = {name: str(scratch / f"{name}.safetensors") for name in ("inputs", "result")}
    save_file(dict(case.inputs), paths["inputs"])
    worker.ask(
        "load", LIMIT_S, checkpoint=str(folder.resolve()), dtype=case.dtype, threads=threads,
        cameras=case.cameras, tokens=case.tokens, rows=len(case.wanted), steps=case.steps,
        rope_frequencies="official", cache=str(scratch),
    )  # fmt: skip
    worker.ask("inputs", LIMIT_S, path=paths["inputs"], steps=case.steps)
    worker.ask("run", LIMIT_S)
    worker.ask("result", LIMIT_S, path=paths["result"])
    actions = load_file(paths["result"])["actions"].double()
    if case.measure == "norm":
        return relative(actions, case.wanted.double())
    return float((actions - case.wanted.double()).abs().max())
