"""The kernel table of one engine: its context, and the policy and profile its config asks for."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch

from phyai.binding import HookBinder
from phyai.cuda_graph import capturing
from phyai.engine_config import EngineConfig, KernelConfig
from phyai.env import cache_dir
from phyai.errors import ConfigError
from phyai.kernels import Autotuner, KernelPolicy, KernelTable, cpu, load_policy, parse_policy
from phyai.kernels.facts import process_facts
from phyai.plugins import find, load_hook_plugins

log = logging.getLogger("phyai")

_LARGE = 2**20  # weights


def kernel_table(
    config: EngineConfig, device: torch.device, family: str | None = None
) -> KernelTable:
    """Return the built-in rows with the facts of this process; the policy comes after all rows."""
    forced = config.runtime.force_linear_kernel
    return KernelTable(
        force={} if forced is None else {"linear": forced},
        context=process_facts(device, family),
    )


def installed_table(plugin: str | None = None) -> KernelTable:
    """Return the table an engine of ``plugin`` would have on this machine, without an engine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = None if plugin is None else find(plugin)
    table = KernelTable(context=process_facts(device, None if record is None else record.id))
    table.add(HookBinder(load_hook_plugins(), record, None, None).kernel_rows())
    return table


def apply_policy(table: KernelTable, config: EngineConfig) -> None:
    """Let the policy and profile of a config decide from now on.

    Layers ask its ``quantization`` section when they are built; one that no kernel runs in the
    format it gets refuses to be built, with its name.
    Raises: ConfigError for a policy that is wrong or names what is not in the table, and for one
        that measures where there are several ranks.
    """
    policy = read_policy(config.kernel, table.known_facts)
    profile = config.kernel.profile or (policy.profile if policy else None)
    tuner, ranks = None, config.parallel.infer_replica_world_size()
    if profile == "autotune":
        if ranks > 1:
            raise ConfigError(
                "kernel profile must be 'static' where several ranks compute alike, as each would "
                f"measure for itself; got 'autotune' with {ranks} ranks. Write what one rank "
                "measured into a policy."
            )
        tuner = Autotuner(
            config.kernel.benchmark, config.kernel.autotune_cache, capturing=capturing
        )
    elif profile is None and ranks == 1 and table.context.get("device.type") == "cpu":
        tuner = cpu_tuner(config.kernel)
    table.use(policy, tuner)
    if policy is not None:
        log.info("kernel policy %s, catalogue %s", policy.fingerprint, table.fingerprint)


def cpu_tuner(config: KernelConfig) -> Autotuner | None:
    """Return what decides between the C++ kernels and torch's on CPUs that have units for bfloat16.

    Both are good there, and no table says which is better; measured once per machine, and not for
    several ranks, which must choose alike. None on other CPUs: the catalogue's order is right.
    """
    if not cpu.has_16_bit_arithmetic():
        return None
    cache = config.autotune_cache or cache_dir() / "kernels.json"
    return Autotuner(config.benchmark, cache, capturing=capturing, worth=worth_measuring)


def worth_measuring(facts: Mapping[str, Any]) -> bool:
    """Return whether a decision is about bfloat16 products of a size that takes time.

    >>> worth_measuring({"op": "linear", "dtype": "bfloat16", "in_features": 8, "out_features": 8})
    False
    """
    if facts["dtype"] != "bfloat16":
        return False
    if facts["op"] == "linear":
        return int(facts.get("in_features", 0)) * int(facts.get("out_features", 0)) >= _LARGE
    return facts["op"] == "attention" and int(facts.get("head_dim", 0)) >= 64


def read_policy(config: KernelConfig, facts: Collection[str] = ()) -> KernelPolicy | None:
    """Return the policy of a config, from its file or inline; None without one.

    facts: names known besides core's own.  Raises: ConfigError with the path of what is wrong.
    """
    if config.config_path is not None:
        return load_policy(config.config_path, facts=facts)
    if config.policy_config is not None:
        return parse_policy(config.policy_config, where="kernel_policy", facts=facts)
    return None
