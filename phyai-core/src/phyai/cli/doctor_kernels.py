"""`phyai doctor --kernels`: the kernel table, what would be chosen here, and which rule says so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai import env
from phyai.cli import console

if TYPE_CHECKING:
    from phyai.kernels import KernelPolicy, KernelTable
    from phyai.kernels.policy import BoundPolicy

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "*": "*"}
DTYPES = ("float32", "bfloat16")


def examine(path: Path | None, plugin: str | None) -> dict[str, Any]:
    """Return the kernel table by op with what would be chosen on this machine per dtype, and why.

    path: a policy file; None for that of PHYAI_KERNEL_CONFIG, if any.  plugin: whose engine
    chooses; its own rows count, and it is the policy's ``model.family``.
    Raises: ConfigError for a wrong policy or two of its rules that contradict each other.
    """
    from phyai.kernel_setup import installed_table, read_policy
    from phyai.kernels import Autotuner

    table = installed_table(plugin)
    device = str(table.context["device.type"])
    config = _kernel_config(path)
    policy = read_policy(config, table.known_facts)
    profile = config.profile or (policy.profile if policy else "static")
    # A preview measures nothing; it shows what a cache already knows.
    table.use(policy, Autotuner(cache=config.autotune_cache) if profile == "autotune" else None)
    report: dict[str, Any] = {
        "kernels": [_entry(table, op, device) for op in table.ops],
        "catalogue": table.fingerprint,
        "kernel_profile": profile,
    }
    if policy is not None and table.policy is not None:
        report["policy"] = _policy(policy, table.policy, table, device)
        report["policy"]["source"] = str(config.config_path)
    return report


def _kernel_config(path: Path | None) -> Any:
    from phyai.engine_config import EngineConfig

    config = env.override(EngineConfig(), explicit=False).kernel
    return config if path is None else config.replace(config_path=str(path))


def _entry(table: KernelTable, op: str, device: str) -> dict[str, Any]:
    chosen = {dtype: table.explain_one(op, device=device, dtype=dtype) for dtype in DTYPES}
    return {
        "op": op,
        "device": device,
        "chosen": {dtype: choice.row for dtype, choice in chosen.items()},
        "why": {dtype: choice.by for dtype, choice in chosen.items()},
        "refused": {dtype: dict(choice.refused) for dtype, choice in chosen.items()},
        "rows": [
            {
                "name": row.name,
                "devices": list(row.devices),
                "dtypes": list(row.dtypes),
                "priority": row.priority,
                "reference": row.reference,
                "capture_safe": row.capture_safe,
            }
            for row in table.rows(op)
        ],
    }


def _policy(
    policy: KernelPolicy, bound: BoundPolicy, table: KernelTable, device: str
) -> dict[str, Any]:
    return {
        "fingerprint": policy.fingerprint,
        "fallback": policy.fallback,
        "rules": [
            {
                "id": rule.id,
                "kind": "override" if rule.strict else "rule",
                "priority": rule.priority,
                "kernels": list(rule.kernels) or [rule.glob],
                "not_here": {
                    f"{op} {SHORT[dtype]}": rule.match.problem(
                        table.facts_of(op, device=device, dtype=dtype)
                    )
                    for op in bound.ops_of(rule)
                    for dtype in DTYPES
                },
            }
            for rule in policy.entries
        ],
        "quantization": [
            f"{rule.selector} {rule.pattern!r}: {rule.scheme or 'left as it is'}"
            for rule in policy.quantization.rules
        ]
        + ([f"all others: {policy.quantization.default}"] if policy.quantization.default else []),
    }


def show(report: dict[str, Any]) -> None:
    """Print what ``examine`` found as text."""
    kernels = report["kernels"]
    rows = [("op", "kernel", "devices", "dtypes", "priority", "chosen for")]
    for entry in kernels:
        for number, row in enumerate(entry["rows"]):
            used = [dtype for dtype, name in entry["chosen"].items() if name == row["name"]]
            rows.append(
                (
                    entry["op"] if number == 0 else "",
                    row["name"],
                    " ".join(row["devices"]),
                    " ".join(SHORT.get(dtype, dtype) for dtype in row["dtypes"]),
                    "reference" if row["reference"] else str(row["priority"]),
                    " ".join(SHORT[dtype] for dtype in used),
                )
            )
    print(f"\nkernels, and the choice on {kernels[0]['device'] if kernels else 'cpu'}")
    print("\n".join(console.aligned(rows)))
    for entry in kernels:
        for dtype, why in entry["why"].items():
            if why:
                _print_choice(entry, dtype, why)
    print(f"\ncatalogue {report['catalogue']}, profile {report['kernel_profile']}")
    if "policy" in report:
        _print_policy(report["policy"])


def _print_choice(entry: dict[str, Any], dtype: str, why: str) -> None:
    row = entry["chosen"][dtype] or "nothing fits, an engine would not start"
    print(f"\n{entry['op']} {SHORT[dtype]}: {row}, by {why}")
    for name, reason in entry["refused"][dtype].items():
        print(f"  not {name}: {reason}")


def _print_policy(policy: dict[str, Any]) -> None:
    print(f"policy {policy['fingerprint']} of {policy['source']}, fallback {policy['fallback']}")
    for rule in policy["rules"]:
        here = [where for where, why in rule["not_here"].items() if why is None]
        reasons = dict.fromkeys(why for why in rule["not_here"].values() if why is not None)
        said = f"matches {', '.join(here)}" if here else f"not here: {'; '.join(reasons)}"
        print(f"  {rule['kind']} {rule['id']}, priority {rule['priority']}: {said}")
    for line in policy["quantization"]:
        print(f"  quantization: {line}")
