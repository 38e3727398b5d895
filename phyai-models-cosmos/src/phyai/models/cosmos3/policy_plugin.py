"""Entry point of plugin ``cosmos3_policy``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.options import COMMON, POLICY_OWN
from phyai.models.cosmos3.robots import DROID, ROBOTS


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="cosmos3_policy",
        summary="Cosmos3 robot policy: actions from one frame, and forward and inverse dynamics",
        target="phyai.models.cosmos3.main_cosmos3:Cosmos3PolicyAdapter",
        args="phyai.models.cosmos3.main_cosmos3:Cosmos3PolicyArgs",
        api=(1, 0),  # the adapter API it is written for
        architectures=("Cosmos3ForConditionalGeneration", "cosmos3_omni"),
        capabilities={
            "kind": "world-action-model",
            "action_dim": len(DROID.names),
            "horizon": DROID.chunk_size,
            "control_hz": DROID.fps,
            "cameras": list(DROID.cameras),
            "options": list(COMMON),
            "own_options": list(POLICY_OWN),
            "files": list(FILES),
            "parallel": ["tp", "cfg"],
            "precisions": {"fp32": ["float32"], "bf16": ["bfloat16"]},
            "rtc": [],
            "sessions": False,
            "robots": {name: robot.to_json() for name, robot in ROBOTS.items()},
        },
        aliases=("cosmos3_policy_wn",),
        presets=(
            Preset(
                "tiny",
                "small random Cosmos3 with NVIDIA's DROID settings, built on first use",
                "phyai.models.cosmos3.presets.builders:tiny_cosmos3_policy",
                "phyai.models.cosmos3.presets.builders:sample_observation",
            ),
        ),
        weights_licence="see the page of each checkpoint",
        golden="phyai.models.cosmos3.golden:policy_runs",
        cost="phyai.models.cosmos3.main_cosmos3:cost",
        media="phyai.models.cosmos3.result_files:files",
    )
