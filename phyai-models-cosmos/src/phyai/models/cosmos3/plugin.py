"""Entry point of plugin ``cosmos3``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl
from phyai.models.cosmos3.downloads import FILES
from phyai.models.cosmos3.options import COMMON, GENERATION_OWN


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="cosmos3",
        summary="Cosmos3 generation: text, image or video to video, text to image, with sound",
        target="phyai.models.cosmos3.main_cosmos3:Cosmos3Adapter",
        args="phyai.models.cosmos3.main_cosmos3:Cosmos3Args",
        api=(1, 0),  # the adapter API it is written for
        architectures=("Cosmos3ForConditionalGeneration", "cosmos3_omni"),
        capabilities={
            "kind": "world-model",
            "options": list(COMMON),
            "own_options": list(GENERATION_OWN),
            "files": list(FILES),
            "parallel": ["tp", "cfg"],
            "precisions": {"fp32": ["float32"], "bf16": ["bfloat16"]},
            "rtc": [],
            "sessions": False,
        },
        aliases=("cosmos3_wn",),
        presets=(
            Preset(
                "tiny",
                "small random Cosmos3 with sound in the released layout, built on first use",
                "phyai.models.cosmos3.presets.builders:tiny_cosmos3",
                "phyai.models.cosmos3.presets.builders:sample_prompt",
            ),
        ),
        weights_licence="see the page of each checkpoint",
        golden="phyai.models.cosmos3.golden:generation_runs",
        cost="phyai.models.cosmos3.main_cosmos3:cost",
        media="phyai.models.cosmos3.result_files:files",
    )
