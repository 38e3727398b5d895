"""Entry point of plugin ``minicpm_robot_track``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, Preset, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="minicpm_robot_track",
        summary="MiniCPM-RobotTrack: tracking over a window of frames, waypoints in one call",
        target="phyai.models.minicpm_robot_track.main_minicpm_robot_track:MiniCPMRobotTrackAdapter",
        args="phyai.models.minicpm_robot_track.main_minicpm_robot_track:MiniCPMRobotTrackArgs",
        api=(1, 0),  # the adapter API it is written for
        architectures=("minicpm_robot_track", "MiniCPMRobotTrackForWaypoint"),
        key_probes=("temporal_markers.stream_embedding.weight", "tvi.kind_emb.weight"),
        capabilities={
            "kind": "tracker",
            "action_dim": 3,
            "horizon": 8,
            "cameras": ["front"],
            "control_hz": 10.0,
            # and those of this plugin alone: stream_id, frame_index, coarse_tokens, fine_tokens
            "options": ["session_id", "seq"],
            "parallel": [],
            "precisions": {"fp32": ["float32"], "bf16": ["bfloat16"]},
            "sessions": True,
        },
        presets=(
            Preset(
                "tiny",
                "small random tracker and vision towers in the released layouts, built on first "
                "use",
                "phyai.models.minicpm_robot_track.presets.builders:tiny_minicpm_robot_track",
                "phyai.models.minicpm_robot_track.presets.builders:sample_observation",
            ),
            Preset(
                "full-random",
                "released sizes, vision towers included, random bf16 weights (2 GB), for memory "
                "and speed",
                "phyai.models.minicpm_robot_track.presets.builders:full_random_minicpm_robot_track",
                "phyai.models.minicpm_robot_track.presets.builders:sample_observation",
            ),
        ),
        weights_licence="Apache-2.0 (OpenBMB); DINOv3 and SigLIP have their own: see their pages",
        golden="phyai.models.minicpm_robot_track.golden:golden_runs",
    )
