"""Entry point of plugin ``minicpm_robot``; imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phyai.hooks import AdapterManifest, Preset, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from phyai.kernels import KernelRow


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="minicpm_robot",
        summary="MiniCPM-RobotManip: SigLIP tower with two mergers, hybrid linear-attention "
        "decoder, clean-action diffusion transformer",
        target="phyai.models.minicpm_robot.main_minicpm_robot:MiniCPMRobotAdapter",
        args="phyai.models.minicpm_robot.main_minicpm_robot:MiniCPMRobotArgs",
        api=(1, 0),  # the adapter API it is written for
        architectures=("MiniCPMV_VLA",),
        key_probes=(
            "vlm.llm.model.layers.0.linear_attn.A_log",
            "vlm.model.language_model.layers.0.linear_attn.A_log",
        ),
        capabilities={
            "kind": "vla",
            "action_dim": 80,
            "horizon": 30,
            # and "contract" and "embodiment_id", of this plugin alone: see expects()
            "options": ["seed", "noise", "num_steps"],
            "parallel": [],
            "precisions": {"fp32": ["float32"], "bf16": ["bfloat16"]},
            "rtc": [],
            "sessions": False,
        },
        aliases=("minicpm_gr00t",),
        presets=(
            Preset(
                "tiny",
                "small random MiniCPM-Robot in the released layout, built on first use",
                "phyai.models.minicpm_robot.presets.builders:tiny_minicpm_robot",
                "phyai.models.minicpm_robot.presets.builders:sample_observation",
            ),
            Preset(
                "full-random",
                "released size, random weights (bf16, head fp32: 3.5 GB), for memory and speed",
                "phyai.models.minicpm_robot.presets.builders:full_random_minicpm_robot",
                "phyai.models.minicpm_robot.presets.builders:sample_observation",
            ),
        ),
        weights_licence="see the page of each checkpoint",
        golden="phyai.models.minicpm_robot.golden:golden_runs",
        cost="phyai.models.minicpm_robot.main_minicpm_robot:cost",
    )


@hookimpl
def phyai_kernels() -> Sequence[KernelRow]:
    """Return the rows of the linear-attention ops; called when an engine starts."""
    from phyai.models.minicpm_robot.ops import kernel_rows

    return kernel_rows()
