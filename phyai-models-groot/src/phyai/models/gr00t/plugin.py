"""Entry point of plugin ``gr00t_n17``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="gr00t_n17",
        summary="GR00T N1.7: Qwen3-VL backbone, alternating diffusion transformer, per-embodiment "
        "projectors",
        target="phyai.models.gr00t.main_gr00t:GrootAdapter",
        args="phyai.models.gr00t.main_gr00t:GrootArgs",
        api=(1, 0),  # the adapter API it is written for
        architectures=("Gr00tN1d7",),
        key_probes=("action_head.vlln.weight", "action_head.action_encoder.W1.W"),
        capabilities={
            "kind": "vla",
            "action_dim": 132,
            "horizon": 40,
            # and "embodiment", of this plugin alone: see expects()
            "options": ["seed", "noise", "num_steps", "rtc"],
            "parallel": [],
            "precisions": {"fp32": ["float32"], "bf16": ["bfloat16"]},
            "rtc": ["ramp"],
            "sessions": False,
        },
        presets=(
            Preset(
                "tiny",
                "small random GR00T N1.7 in the released layout, built on first use",
                "phyai.models.gr00t.presets.builders:tiny_gr00t",
                "phyai.models.gr00t.presets.builders:sample_observation",
            ),
            Preset(
                "full-random",
                "released size, random bf16 weights (6 GB), for memory and speed",
                "phyai.models.gr00t.presets.builders:full_random_gr00t",
                "phyai.models.gr00t.presets.builders:sample_observation",
            ),
        ),
        weights_licence="NVIDIA Open Model License; see the page of each checkpoint",
        golden="phyai.models.gr00t.golden:golden_runs",
        cost="phyai.models.gr00t.main_gr00t:cost",
    )
