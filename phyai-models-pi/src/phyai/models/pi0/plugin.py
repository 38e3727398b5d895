"""Entry point of plugin ``pi0``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="pi0",
        summary="pi0: vision-language-action flow model with a continuous state token",
        target="phyai.models.pi0.main_pi0:PI0Adapter",
        args="phyai.models.pi0.main_pi0:PI0Args",
        api=(1, 0),  # the adapter API it is written for
        architectures=("pi0",),
        key_probes=("state_proj.weight",),
        capabilities={
            "kind": "vla",
            "action_dim": 32,
            "horizon": 50,
            "cameras": ["base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb"],
            "options": ["seed", "noise", "num_steps", "rtc"],
            "parallel": ["tp"],
            "precisions": {
                "fp32": ["float32"],
                "bf16_openpi": ["bf16", "bfloat16"],
                "bf16_lerobot": [],
            },
            "rtc": ["guided"],
            "sessions": False,
        },
        presets=(
            Preset(
                "tiny",
                "small random pi0 in the released LeRobot layout, built on first use",
                "phyai.models.pi.presets.builders:tiny_pi0",
                "phyai.models.pi.presets.builders:sample_observation",
            ),
            Preset(
                "full-random",
                "released size, random bf16 weights (7.1 GB), for memory and speed",
                "phyai.models.pi.presets.builders:full_random_pi0",
                "phyai.models.pi.presets.builders:sample_observation",
            ),
        ),
        weights_licence="Apache-2.0 (openpi) with the Gemma terms of use",
        golden="phyai.models.pi0.golden:golden_runs",
        cost="phyai.models.pi0.main_pi0:cost",
    )
