"""The preset of the manifest: a small random checkpoint, and an observation for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from phyai.built_folder import cached_folder
from phyai.types import Observation


def tiny(cache_dir: Path, progress: Callable[[int, int, str], None] | None) -> dict[str, Any]:
    """Return the arguments of the random checkpoint, written below ``cache_dir`` if needed."""
    name = f"act_policy-tiny-{_version()}"
    return {"checkpoint_dir": str(cached_folder(Path(cache_dir), name, write))}


def _version() -> str:
    """Return a name for the package's sources: edit them, and the checkpoint is written anew."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def write(folder: Path) -> None:
    """Write a random checkpoint."""
    import torch
    from phyai.kernels import CATALOGUE, KernelTable
    from phyai.layers import Placement
    from phyai.weights import randomize, save_safetensors
    from phyai.weights.binding import collect_claims

    from act_policy.network import ACT, ACTConfig

    config = ACTConfig()
    plain = KernelTable(row for row in CATALOGUE if row.reference)
    network = ACT(config, Placement(plain, torch.device("cpu"), torch.float32))

    def scheme(name: str, value: torch.Tensor) -> tuple[float, float] | None:
        return (1.0, 0.02) if "norm" in name and name.endswith(".weight") else None

    randomize(network, 0, scheme=scheme)
    tensors = {}
    for claim in collect_claims(network):
        value, sizes = claim.param.detach(), getattr(claim.loader, "sizes", None)
        if sizes is not None and claim.shard_id is not None:
            value = torch.split(value, sizes)[claim.shard_id]
        tensors[claim.keys[0]] = value.clone()
    config.save(folder)
    save_safetensors(tensors, folder / "model.safetensors")


def sample_observation(args: Mapping[str, Any]) -> Observation:
    image = np.full((48, 64, 3), 120, dtype=np.uint8)
    image[10:30, 20:40] = (200, 160, 40)
    return Observation(images={"top": image}, state=[0.1, -0.4, 0.3, 0.0, 0.2, -0.1, 0.5])
