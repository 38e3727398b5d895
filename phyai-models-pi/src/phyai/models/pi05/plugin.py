"""Entry point of plugin ``pi05``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="pi05",
        summary="pi0.5: vision-language-action flow model, state in the prompt, adaRMS expert",
        target="phyai.models.pi05.main_pi05:PI05Adapter",
        args="phyai.models.pi05.main_pi05:PI05Args",
        api=(1, 0),  # the adapter API it is written for
        architectures=("pi05",),
        key_probes=("time_mlp_in.weight",),
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
            "rtc": ["guided", "trained"],
            "sessions": False,
        },
        aliases=("pi05_wn",),
        presets=(
            Preset(
                "tiny",
                "small random pi0.5 in the released LeRobot layout, built on first use",
                "phyai.models.pi.presets.builders:tiny_pi05",
                "phyai.models.pi.presets.builders:sample_observation",
            ),
            Preset(
                "full-random",
                "released size, random bf16 weights (7.3 GB), for memory and speed",
                "phyai.models.pi.presets.builders:full_random_pi05",
                "phyai.models.pi.presets.builders:sample_observation",
            ),
        ),
        weights_licence="Apache-2.0 (openpi) with the Gemma terms of use",
        golden="phyai.models.pi05.golden:golden_runs",
        cost="phyai.models.pi05.main_pi05:cost",
    )
