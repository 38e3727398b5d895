"""What a policy may ask about a decision: the facts, their kinds, and where their values come from.

A layer passes flat facts (``in_features=2048``) to ``KernelTable.select``; a policy reads dotted
ones (``shape.in_features``). Values that hold for the whole process (device, libraries, model) are
the table's context, under their dotted names.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Kind = Literal["op", "text", "number", "arch", "version", "dtype", "any"]
"""How values of a fact compare: numbers and versions by size, archs by their SM number."""

NAMESPACES = ("device", "quant", "model", "shape", "dtype", "attrs", "lib")

_SHAPES = (
    "rows", "in_features", "out_features", "width", "head_dim", "heads", "kv_heads", "queries",
    "keys", "batch", "tokens",
)  # fmt: skip
_ATTRS = ("activation", "bias", "capture", "epilogue", "gated", "masked", "packed", "rounding")
_LIBRARIES = {
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "phyai": "phyai-core",
}

FACTS: dict[str, Kind] = {
    "op": "op",
    "role": "text",
    "device.type": "text",
    "device.vendor": "text",
    "device.arch": "arch",
    "device.name": "text",
    "device.features": "text",
    "device.cores": "number",
    "model.family": "text",
    "quant.format": "text",
    "quant.layout": "text",
    "quant.weight": "text",
    "quant.input": "text",
    "quant.granularity": "text",
    "dtype.input": "dtype",
    "dtype.weight": "dtype",
    "dtype.bias": "dtype",
    "dtype.output": "dtype",
    **{f"shape.{name}": "number" for name in _SHAPES},
    **{f"attrs.{name}": "any" for name in _ATTRS},
    **{f"lib.{name}": "version" for name in _LIBRARIES},
    "lib.cuda": "version",
}
"""Every fact of core's own ops; a row of a plugin names further ones in ``KernelRow.facts``."""

ALIASES = {
    "device": "device.type",
    "dtype": "dtype.input",
    "shape.M": "shape.rows",
    "shape.K": "shape.in_features",
    "shape.N": "shape.out_features",
}
"""Other spellings in a match."""

OP_ALIASES = {"gemm": "linear", "rmsnorm": "rms_norm", "layernorm": "layer_norm"}
"""Op names that earlier policy files use."""

_DTYPE_FACTS = {
    "dtype": "dtype.input",
    "weight_dtype": "dtype.weight",
    "bias_dtype": "dtype.bias",
    "out_dtype": "dtype.output",
}


def fact_name(flat: str) -> str:
    """Return the dotted name of a fact that a layer passes.

    >>> from phyai.kernels.facts import fact_name
    >>> fact_name("head_dim"), fact_name("masked"), fact_name("role")
    ('shape.head_dim', 'attrs.masked', 'role')
    """
    if flat in ("op", "role") or "." in flat:
        return flat
    if flat == "device":
        return "device.type"
    if flat in _DTYPE_FACTS:
        return _DTYPE_FACTS[flat]
    return f"shape.{flat}" if flat in _SHAPES else f"attrs.{flat}"


def dotted(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of one decision under the names a policy uses."""
    return {fact_name(name): value for name, value in facts.items()}


def device_facts(device: torch.device) -> dict[str, Any]:
    """Return what is known about a device, under the names of ``FACTS``.

    arch is ``sm90`` or the machine's (``x86_64``); cores are multiprocessors or torch's threads.
    """
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        amd = torch.version.hip is not None
        return {
            "device.type": "cuda",
            "device.vendor": "amd" if amd else "nvidia",
            "device.arch": properties.gcnArchName
            if amd
            else f"sm{properties.major}{properties.minor}",
            "device.name": properties.name,
            "device.cores": properties.multi_processor_count,
        }
    # Older releases of torch do not tell.
    told: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return {
        "device.type": device.type,
        "device.arch": platform.machine().lower(),
        "device.name": str(told.get("cpu_name", platform.processor())),
        "device.features": tuple(sorted(name for name, there in told.items() if there is True)),
        "device.cores": torch.get_num_threads(),
    }


def library_facts() -> dict[str, Any]:
    """Return the versions of the libraries kernels come from; imports none but torch."""
    import torch

    found = {}
    for name, distribution in _LIBRARIES.items():
        try:
            found[f"lib.{name}"] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["lib.cuda"] = torch.version.cuda
    return found


def process_facts(device: torch.device, family: str | None = None) -> dict[str, Any]:
    """Return the context of a table: device, libraries, and the model's family when given."""
    found = {**device_facts(device), **library_facts()}
    return found if family is None else {**found, "model.family": family}
