"""Made-up arguments of an op, of the sizes a layer tells, to measure kernels on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from phyai.kernels.quant import scheme_of
from phyai.kernels.rows import Kernel

# Where a layer does not tell how long its sequences are: a short query over a longer prefix.
_ROWS, _KEYS, _HEADS = 64, 1024, 8


@dataclass(frozen=True)
class Sample:
    """Arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class _Maker:
    """Draws tensors for one set of facts, the same ones every time."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        self.device = torch.device(str(facts["device"]))
        self.dtype: torch.dtype = getattr(torch, str(facts["dtype"]))
        self._generator = torch.Generator("cpu").manual_seed(0)

    def size(self, name: str, default: int | None = None) -> int:
        value = self.facts.get(name, default)
        if value is None:
            raise KeyError(name)
        return int(value)

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return made.to(self.device, dtype or self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return self.draw(*shape, dtype=torch.float32)


def _linear(make: _Maker) -> Sample:
    inputs, outputs = make.size("in_features"), make.size("out_features")
    bias = make.draw(outputs) if make.facts.get("bias") else None
    return Sample((make.draw(make.size("rows", _ROWS), inputs), make.draw(outputs, inputs), bias))


def _rms_norm(make: _Maker) -> Sample:
    width = make.size("width")
    return Sample((make.draw(make.size("rows", _ROWS), width), make.wide(width), 1e-6))


def _layer_norm(make: _Maker) -> Sample:
    width = make.size("width")
    x = make.draw(make.size("rows", _ROWS), width)
    return Sample((x, make.draw(width), make.draw(width), 1e-6))


def _ada_norm(make: _Maker) -> Sample:
    width = make.size("width")
    x = make.draw(1, make.size("rows", _ROWS), width)
    return Sample((x, make.wide(width), make.wide(width), 1e-6))


def _apply_rope(make: _Maker) -> Sample:
    rows, dim = make.size("rows", _ROWS), make.size("head_dim")
    x = make.draw(1, rows, make.size("heads", _HEADS), dim)
    return Sample((x, make.wide(1, rows, dim), make.wide(1, rows, dim)))


def _attention(make: _Maker) -> Sample:
    dim, keys = make.size("head_dim"), make.size("keys", _KEYS)
    kv_heads = make.size("kv_heads", 1)
    queries = make.size("queries", make.size("rows", _ROWS))
    q = make.draw(1, queries, make.size("heads", _HEADS), dim)
    k, v = (make.draw(1, keys, kv_heads, dim) for _ in range(2))
    mask = None
    if make.facts.get("masked"):
        mask = torch.arange(keys, device=make.device)[None] < keys - keys // 8
    return Sample((q, k, v, dim**-0.5), {"key_mask": mask})


_MAKERS: dict[str, Callable[[_Maker], Sample]] = {
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "ada_rms_norm": _ada_norm,
    "ada_layer_norm": _ada_norm,
    "apply_rope": _apply_rope,
    "attention": _attention,
}


def packed(made: Sample, kernel: Kernel, facts: Mapping[str, Any]) -> Sample:
    """Return a sample of ``linear`` with its weight laid out as the kernel's row wants it.

    As a layer packs: for the epilogue only where the row does it itself.
    """
    pack = kernel.pack
    if pack is None:
        return made
    wanted = str(facts.get("epilogue", "none"))
    epilogue = wanted if wanted in kernel.row.epilogues else "none"
    x, weight, *rest = made.args
    return Sample((x, pack(weight, epilogue, scheme_of(facts)), *rest), made.kwargs)


def sample(facts: Mapping[str, Any]) -> Sample | None:
    """Return arguments for the op of some facts, or None when they do not tell its sizes.

    Shapes: as in ``reference``, of the sizes in the facts; the weights are small random numbers.
    """
    make = _MAKERS.get(str(facts["op"]))
    try:
        return None if make is None else make(_Maker(facts))
    except KeyError:
        return None
