"""The correct toy policy as a distribution, mutants of it, and an independent reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from phyai.testing.sandbox import Sandbox
from phyai.weights import save_safetensors

PACKAGE = "correct_policy"
SOURCES = Path(__file__).parent
"""Folder of the packages, among them ``PACKAGE``."""
PLUGIN = "toy_policy"
LOAD = "        return load_pretrained(self.network, folder, strict=True)\n"
VELOCITY = "        velocity = self.act(inside).float()\n"
"""Lines of the correct policy that several mutants change."""


@dataclass(frozen=True)
class Mutant:
    """One line of the correct policy made wrong.

    file: module of the package.  changes: (old, new) texts, each found exactly once.
    caught: the check that must catch it, with the words of its message.
    also: checks that the same fault breaks.  maybe: checks it may break, by chance.
    only: globs of the checks that are run; spawned processes cost seconds.
    """

    file: str
    changes: tuple[tuple[str, str], ...]
    caught: str
    message: str
    also: tuple[str, ...] = ()
    maybe: tuple[str, ...] = ()
    only: tuple[str, ...] = (
        "l1_*",
        "l2_*",
        "l3_prepare*",
        "l3_threads*",
        "l3_malformed*",
        "l3_queued*",
    )


def install(
    sandbox: Sandbox,
    mutant: Mutant | None = None,
    *,
    package: str = PACKAGE,
    plugin: str = PLUGIN,
) -> None:
    """Install the toy policy, or a mutant of it, as distribution ``toy-policy`` 1.0."""
    folder = SOURCES / package
    sources = {path.stem: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    for old, new in mutant.changes if mutant else ():
        assert mutant is not None
        assert sources[mutant.file].count(old) == 1, old
        sources[mutant.file] = sources[mutant.file].replace(old, new)
    sandbox.distribution(
        plugin.replace("_", "-"),
        {f"{package}.{name}": text for name, text in sources.items()},
        {"phyai.plugins": {plugin: f"{package}.plugin"}},
    )


def checkpoint(folder: Path) -> dict[str, Any]:
    """Write weights without any code of the package; return the adapter's arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(5)
    shapes = {
        "see.weight": (16, 8), "see.bias": (16,), "act.weight": (3, 19), "act.bias": (3,)
    }  # fmt: skip
    tensors = {
        name: torch.from_numpy(random.normal(size=shape).astype(np.float32) / 2)
        for name, shape in shapes.items()
    }
    save_safetensors(tensors, folder / "model.safetensors")
    return {"checkpoint_dir": str(folder)}


def requests() -> list[Any]:
    """Return two observations of different content, and both as one request."""
    from phyai.types import Observation

    rows = []
    for seed in (1, 2):
        random = np.random.default_rng(seed)
        image = random.integers(0, 256, (6 + seed, 8, 3), dtype=np.uint8)
        state = random.uniform(-1, 1, 5).astype(np.float32)
        rows.append(Observation({"front": image}, state, "reach", {"seed": seed}))
    return [*rows, list(rows)]


def reference(folder: Path) -> Any:
    """Return ``reference(request, noise)``: the policy in numpy, float64."""
    weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}

    def row(observation: Any, noise: Any) -> Any:
        colour = observation.images["front"].reshape(-1, 3).mean(axis=0) / 255.0
        seen = np.concatenate([colour, observation.state])
        features = np.tanh(weights["see.weight"] @ seen + weights["see.bias"])
        x = np.asarray(noise).astype(np.float64)
        for _ in range(3):
            inside = np.concatenate([np.tile(features, (4, 1)), x], axis=1)
            x = x - (inside @ weights["act.weight"].T + weights["act.bias"]) / 3.0
        return x * np.array([0.1, 0.2, 1.0])

    def result(request: Any, noise: Mapping[str, Any]) -> Any:
        rows = request if isinstance(request, list) else [request]
        return np.stack([row(r, n) for r, n in zip(rows, noise["action"], strict=True)])

    return result


def golden_set(folder: Path, reference_of: Any) -> Path:
    """Write a golden case beside a checkpoint; return the folder."""
    request = requests()[0]
    noise = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(9))
    actions = reference_of(request, {"action": noise.numpy()})[0]
    save_safetensors(
        {
            "in.image": torch.from_numpy(np.array(request.images["front"])),
            "in.state": torch.from_numpy(np.array(request.state)),
            "in.noise": noise[0],
            "actions": torch.from_numpy(actions.astype(np.float32)),
        },
        folder / "case_one.safetensors",
    )
    return folder
