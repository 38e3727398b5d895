"""The preferred back ends of a config (``backends.*``), as the kernel policy's last rules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from phyai.config_yaml import load_yaml_mapping
from phyai.engine_config import EngineConfig, KernelConfig
from phyai.errors import ConfigError
from phyai.kernel_setup import read_policy
from phyai.kernels import KernelTable

log = logging.getLogger("phyai")

OPS: Mapping[str, tuple[str, ...]] = {
    "attn": ("attention",),
    "norm": (
        "rms_norm", "add_rms_norm", "ada_rms_norm", "gated_ada_rms_norm", "layer_norm",
        "add_layer_norm", "ada_layer_norm", "gated_ada_layer_norm",
    ),
    "linear": ("linear",),
}  # fmt: skip
"""Field of ``backends`` -> the ops it speaks of."""

OWN = "phyai-kernel"
LIBRARIES = {OWN: "triton"}
"""Names of back ends that are not the first part of a kernel's name."""

NO_PREFERENCE: Mapping[str, Mapping[str, tuple[str | None, ...]]] = {
    "attn": {"*": ("flashinfer",), "cpu": ("sdpa",)},
    "norm": {"*": ("flashinfer",), "cpu": ("torch",)},
    "linear": {"*": (None,)},
}
"""Defaults of ``BackendConfig`` and of ``EngineConfig.auto`` on a device: the order of the kernel
table decides, in which FlashInfer has its place where it is installed."""

NO_EFFECT = {
    "backends": ("linear_quant", "vgpu"),
    "runtime": (
        "flashinfer_workspace_bytes", "flashinfer_bf16_backend", "flashinfer_autotune",
        "flashinfer_autotune_cache",
    ),
}  # fmt: skip
"""Fields that files of earlier versions set and nothing acts on; said once per engine."""

LAST = -1_000_000
"""Priority of the rules made here: whatever a policy file says comes first."""


def with_backends(config: EngineConfig, table: KernelTable, device: torch.device) -> EngineConfig:
    """Return the config with its preferred back ends written into its kernel policy.

    A preferred kernel that does not fit a layer leaves it to the reference, as any rule does.

    Raises: ConfigError for a back end that has no kernel on this device.
    """
    _say_what_has_no_effect(config)
    rules = [
        {"id": f"backends.{field} of {op}", "priority": LAST, "match": {"op": op}, "prefer": row}
        for field, ops in OPS.items()
        if (wanted := _preference(config, field, device)) is not None
        for op, row in _rows(table, field, ops, wanted, device).items()
    ]
    rules += _prefill(config, table)
    if not rules:
        return config
    read_policy(config.kernel, table.known_facts)  # errors name the user's own file
    policy = _policy_data(config.kernel)
    merged = {**policy, "rules": [*(policy.get("rules") or ()), *rules]}
    return config.replace(kernel=config.kernel.replace(config_path=None, policy_config=merged))


def _preference(config: EngineConfig, field: str, device: torch.device) -> str | None:
    """Return the back end a user asked for, or None for one of the defaults."""
    wanted: str | None = getattr(config.backends, field)
    defaults = NO_PREFERENCE[field]
    return None if wanted in (*defaults["*"], *defaults.get(device.type, ())) else wanted


def _rows(
    table: KernelTable, field: str, ops: Sequence[str], wanted: str, device: torch.device
) -> dict[str, str]:
    """Return op -> the back end's kernel on this device."""
    found: dict[str, str] = {}
    libraries: set[str] = set()
    for op in ops:
        for row in table.rows(op):
            if "*" in row.devices or device.type in row.devices:
                library = row.name.partition(".")[0]
                libraries.add(library)
                if library == LIBRARIES.get(wanted, wanted):
                    found.setdefault(op, row.name)
    if not found:
        names = {library: name for name, library in LIBRARIES.items()}
        listed = ", ".join(sorted(names.get(library, library) for library in libraries))
        raise ConfigError(
            f"backends.{field} must name a back end with kernels for {device.type}; got "
            f"{wanted!r}. Kernels here are of: {listed}."
        )
    return found


def _prefill(config: EngineConfig, table: KernelTable) -> list[dict[str, Any]]:
    """Return the rule that hands ``flashinfer_prefill_backend`` to FlashInfer, where it is."""
    wanted = config.runtime.flashinfer_prefill_backend
    names = [row.name for row in table.rows("attention")]
    if (
        wanted is None
        or "flashinfer.attention" not in names
        or "lib.flashinfer" not in table.context
    ):
        return []
    if config.backends.attn != "flashinfer":
        return []
    return [
        {
            "id": "runtime.flashinfer_prefill_backend",
            "priority": LAST,
            "match": {"op": "attention", "attrs.masked": False},
            "prefer": "flashinfer.attention",
            "params": {"backend": wanted},
        }
    ]


def _policy_data(kernel: KernelConfig) -> Mapping[str, Any]:
    if kernel.config_path is not None:
        return load_yaml_mapping(kernel.config_path)
    return kernel.policy_config or {"schema": "phyai.kernel/v1"}


def _say_what_has_no_effect(config: EngineConfig) -> None:
    for section, fields in NO_EFFECT.items():
        given, default = getattr(config, section), getattr(EngineConfig(), section)
        for field in fields:
            value = getattr(given, field)
            if value != getattr(default, field):
                log.warning("%s.%s %r has no effect in this version", section, field, value)
