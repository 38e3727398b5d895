"""The kernel table of one engine: its context, and the policy and profile its config asks for."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from phyai.binding import HookBinder
from phyai.cuda_graph import capturing
from phyai.engine_config import EngineConfig, KernelConfig
from phyai.errors import ConfigError
from phyai.kernels import Autotuner, KernelPolicy, KernelTable, load_policy, parse_policy
from phyai.kernels.facts import process_facts
from phyai.plugins import find, load_hook_plugins

log = logging.getLogger("phyai")


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

    Raises: ConfigError for a policy that is wrong, names what is not in the table, or asks for
    quantised layers.
    """
    policy = read_policy(config.kernel, table.known_facts)
    profile = config.kernel.profile or (policy.profile if policy else "static")
    tuner = None
    if profile == "autotune":
        tuner = Autotuner(
            config.kernel.benchmark, config.kernel.autotune_cache, capturing=capturing
        )
    table.use(policy, tuner)
    if policy is not None:
        refuse_quantization(policy, config.kernel.config_path)
        log.info("kernel policy %s, catalogue %s", policy.fingerprint, table.fingerprint)


def read_policy(config: KernelConfig, facts: Collection[str] = ()) -> KernelPolicy | None:
    """Return the policy of a config, from its file or inline; None without one.

    facts: names known besides core's own.  Raises: ConfigError with the path of what is wrong.
    """
    if config.config_path is not None:
        return load_policy(config.config_path, facts=facts)
    if config.policy_config is not None:
        return parse_policy(config.policy_config, where="kernel_policy", facts=facts)
    return None


def refuse_quantization(policy: KernelPolicy, path: str | None = None) -> None:
    """Raise ConfigError when a policy would quantise a layer: nothing runs such layers yet."""
    plan = policy.quantization
    if plan.applies:
        first = next((rule.scheme for rule in plan.rules if rule.scheme), plan.default)
        raise ConfigError(
            f"{'' if path is None else f'{path}: '}{policy.where}.quantization must not quantise "
            f"any layer yet; got {first}. Quantised kernels are not built in this version; remove "
            "the section."
        )
