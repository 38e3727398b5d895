"""Entry point of plugin ``toy_policy``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="toy_policy",
        summary="a small flow policy: one camera, a state, seven lines of network",
        target="correct_policy.model:ToyPolicy",
        args="correct_policy.model:ToyArgs",
        capabilities={
            "kind": "vla",
            "action_dim": 3,
            "horizon": 4,
            "cameras": ["front"],
            "options": ["seed", "noise", "num_steps", "rtc"],
            "precisions": {"fp32": ["float32"], "bf16": ["bfloat16"]},
            "rtc": ["guided"],
            "sessions": False,
        },
        presets=(
            Preset(
                "tiny",
                "random weights, written on first use",
                "correct_policy.presets:tiny",
                "correct_policy.presets:sample",
            ),
        ),
        golden="correct_policy.golden:golden_runs",
    )
