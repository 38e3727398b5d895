"""Options of an Observation, by plugin. Torch-free: the plugin modules list them."""

from __future__ import annotations

COMMON = ("seed", "noise", "num_steps", "guidance_scale")
"""Options that core knows."""
POLICY_OWN = ("guidance_interval", "flow_shift", "schedule")
GENERATION_OWN = (
    "negative_prompt",
    "num_frames",
    "fps",
    "height",
    "width",
    "resolution",
    "aspect_ratio",
    "sound",
    "cond_frame_indexes",
    "condition_video_keep",
    "flow_shift",
    "schedule",
    "guidance_interval",
)
