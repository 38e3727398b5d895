"""Builds ``OfficialPi05`` from a checkpoint folder, strictly and without a second copy."""

from __future__ import annotations

from pathlib import Path

import torch
from benchmarks.peers.base import Refused
from benchmarks.peers.hf_model import OfficialPi05, parameter_dtype, parameter_name
from benchmarks.peers.sizes import LM_HEAD, UNUSED, Sizes
from safetensors import safe_open
from torch import Tensor, nn


def load(
    folder: Path,
    dtype: str,
    *,
    bf16_vision: bool = False,
    attention: str = "eager",
    official_rope: bool = False,
) -> OfficialPi05:
    """Return the network in evaluation mode with the weights in ``model.safetensors``.

    official_rope: in bf16, round the rotary frequencies as casting the whole module does.
    Raises: Refused for missing, unexpected or mis-shaped tensors.
    """
    sizes = Sizes.from_folder(folder)
    with torch.device("meta"):
        model = OfficialPi05(sizes, attention)
    _fill(model, folder, dtype, bf16_vision)
    model.build_rotary()
    positions = torch.arange(sizes.vision.patches)[None]
    model.vision.vision_model.embeddings.register_buffer("position_ids", positions, False)
    if official_rope and dtype == "bf16":
        model.rotary.inv_freq = model.rotary.inv_freq.bfloat16()
    return model.eval().requires_grad_(False)


def _fill(model: OfficialPi05, folder: Path, dtype: str, bf16_vision: bool) -> None:
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    file = folder / "model.safetensors"
    wanted = _stored_names(file)
    wrong = sorted(set(shapes) ^ set(wanted))
    if wrong:
        raise Refused(
            f"checkpoint {folder} must hold exactly the network's {len(shapes)} tensors; "
            f"{len(wrong)} are missing or unexpected, such as {wrong[0]!r}."
        )
    for name, stored in wanted.items():
        # Opened for each tensor: pages of an open file would count as resident to the end.
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(stored)
            if tuple(tensor.shape) != shapes[name]:
                raise Refused(
                    f"tensor {stored!r} must have shape {list(shapes[name])}; "
                    f"got {list(tensor.shape)}."
                )
            if dtype == "bf16":  # the official cast narrows the whole module, then widens parts
                tensor = tensor.bfloat16()
            _assign(model, name, tensor, parameter_dtype(name, dtype, bf16_vision=bf16_vision))


def _stored_names(file: Path) -> dict[str, str]:
    """Return parameter name -> key in the file, without what the network does not use."""
    with safe_open(file, framework="pt") as opened:
        keys = {key.removeprefix("model."): key for key in opened.keys()}  # noqa: SIM118
    if any(parameter_name(key) == "embedding.weight" and key != LM_HEAD for key in keys):
        keys.pop(LM_HEAD, None)  # the real embedding wins over the head it may be tied to
    return {
        parameter_name(key): stored for key, stored in keys.items() if not key.startswith(UNUSED)
    }


def _assign(model: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    owner, _, leaf = name.rpartition(".")
    # A copy in ordinary memory, as the official loader leaves it; not a view of the file.
    values = tensor.to(dtype, copy=True)
    setattr(model.get_submodule(owner), leaf, nn.Parameter(values, requires_grad=False))
