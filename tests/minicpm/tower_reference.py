"""The towers as transformers builds them, with random weights, and what follows them in torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DINOv3ViTConfig, DINOv3ViTModel, SiglipVisionConfig, SiglipVisionModel

from phyai.kernels import KernelTable
from phyai.layers import Placement
from phyai.models.minicpm_robot_track.vision import TowerSizes, VisionTowers, load_towers

DINO: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "patch_size": 16,
    "num_register_tokens": 4,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "patch_size": 14,
    "image_size": 100,
}


def placement(dtype: torch.dtype = torch.float32) -> Placement:
    return Placement(KernelTable(), torch.device("cpu"), dtype)


def official_dino(**changes: Any) -> nn.Module:
    config = DINOv3ViTConfig(**{**DINO, **changes}, attn_implementation="eager")
    return drawn(DINOv3ViTModel(config), 1)


def official_siglip(**changes: Any) -> nn.Module:
    config = SiglipVisionConfig(**{**SIGLIP, **changes}, attn_implementation="eager")
    return drawn(SiglipVisionModel(config), 2)


@torch.no_grad()
def drawn(model: nn.Module, seed: int) -> nn.Module:
    """Give every parameter values that matter: none is all zeros or all ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if param.dim() >= 2 and "token" not in name:
            param.copy_(noise * (param.numel() / param.shape[0]) ** -0.5)
        else:
            near_one = name.endswith("lambda1") or ("norm" in name and name.endswith("weight"))
            param.copy_(float(near_one) + 0.2 * noise)
    return model.eval()


def save_official(model: Any, folder: Path) -> Path:
    """Save config and weights as transformers does, names included."""
    model.save_pretrained(folder)
    return folder


def save_tree(model: Any, folder: Path) -> Path:
    """Save config and weights under the names of the module tree."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(
    dino: Path, siglip: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> VisionTowers:
    """Return our towers with the weights of two folders; ``options`` as for VisionTowers."""
    towers = VisionTowers(TowerSizes.from_folders(dino, siglip), placement(dtype), **options)
    load_towers(towers, dino, siglip)
    return towers


def random_frames(count: int, side: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def normalised(frames: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return raw RGB values as a processor hands them to its model."""
    return (frames.float() / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]


@torch.no_grad()
def official_tokens(dino: Any, siglip: Any, frames: Tensor) -> dict[str, Tensor]:
    """Return the patch features of both official models."""
    first = dino(normalised(frames, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    second = siglip(normalised(frames, (0.5,) * 3, (0.5,) * 3))
    prefix = 1 + dino.config.num_register_tokens
    return {
        "dino_tokens": first.last_hidden_state[:, prefix:],
        "siglip_tokens": second.last_hidden_state,
    }


def pooled(dino: Tensor, siglip: Tensor, counts: Mapping[str, int]) -> dict[str, Tensor]:
    """Return SigLIP's resized grid and the joined grid pooled to each count, by torch's pooling."""
    side = round(dino.shape[1] ** 0.5)
    resized = _pool(siglip, side)
    joined = torch.cat((dino, resized), dim=-1)
    made = {name: _pool(joined, round(count**0.5)) for name, count in counts.items()}
    return {"siglip_resized": resized, **made}


def _pool(tokens: Tensor, side: int) -> Tensor:
    frames, count, width = tokens.shape
    old = round(count**0.5)
    grid = tokens.transpose(1, 2).reshape(frames, width, old, old)
    return functional.adaptive_avg_pool2d(grid, side).flatten(2).transpose(1, 2)
