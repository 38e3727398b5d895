"""Builds the official wiring from a checkpoint folder, strictly and without a second copy."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.peers.filling import fill, stored_keys
from benchmarks.peers.pi.hf_network import NETWORKS, OfficialPi, parameter_dtype, parameter_name
from benchmarks.peers.pi.sizes import LM_HEAD, UNUSED, PiSizes


def load(
    folder: Path,
    dtype: str,
    *,
    bf16_vision: bool = False,
    attention: str = "eager",
    official_rope: bool = False,
) -> OfficialPi:
    """Return the network in evaluation mode with the weights in ``model.safetensors``.

    official_rope: in bf16, round the rotary frequencies as casting the whole module does.
    Raises: Refused for missing, unexpected or mis-shaped tensors.
    """
    sizes = PiSizes.from_folder(folder)
    with torch.device("meta"):
        model = NETWORKS[sizes.model](sizes, attention)
    fill(
        model,
        folder,
        _stored(folder),
        lambda name: parameter_dtype(name, dtype, bf16_vision=bf16_vision),
        narrow_first=dtype == "bf16",
    )
    model.build_rotary()
    positions = torch.arange(sizes.vision.patches)[None]
    model.vision.vision_model.embeddings.register_buffer("position_ids", positions, False)
    if official_rope and dtype == "bf16":
        model.rotary.inv_freq = model.rotary.inv_freq.bfloat16()
    return model.eval().requires_grad_(False)


def _stored(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return parameter -> file and key, without what the network does not use."""
    keys = {key.removeprefix("model."): (file, key) for key, file in stored_keys(folder).items()}
    if any(parameter_name(key) == "embedding.weight" and key != LM_HEAD for key in keys):
        keys.pop(LM_HEAD, None)  # the real embedding wins over the head it may be tied to
    return {parameter_name(key): at for key, at in keys.items() if not key.startswith(UNUSED)}
