"""Entry point of plugin ``my_policy``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="my_policy",
        summary="flow-matching policy: one camera, state, prompt",
        target="my_policy.adapter:PolicyAdapter",
        args="my_policy.adapter:PolicyArgs",
        api=(1, 0),  # the adapter API it is written for
        architectures=("my_policy",),
        capabilities={
            "kind": "vla",
            "action_dim": 2,
            "horizon": 8,
            "cameras": ["top"],
            "control_hz": 10.0,
            "options": ["seed", "noise", "num_steps"],
        },
        presets=(
            Preset(
                "trained",
                "drives the gripper to the square of the named colour",
                build="my_policy.presets:trained",
                sample="my_policy.presets:sample_observation",
            ),
        ),
    )
