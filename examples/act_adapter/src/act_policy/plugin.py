"""Entry point of plugin ``act``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="act",
        summary="action chunking with transformers: camera and state to a chunk in one call",
        target="act_policy.adapter:ACTAdapter",
        args="act_policy.adapter:ACTArgs",
        api=(1, 0),  # the adapter API it is written for
        architectures=("act_policy",),
        capabilities={
            "kind": "regression",
            "action_dim": 7,
            "horizon": 20,
            "cameras": ["top"],
            "control_hz": 50.0,
            "options": [],
        },
        presets=(
            Preset(
                "tiny",
                "small random weights, written on first use",
                build="act_policy.presets:tiny",
                sample="act_policy.presets:sample_observation",
            ),
        ),
    )
