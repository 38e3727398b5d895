"""One evaluation of the network: a request of one step whose noise is the state to look at."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import Adapter
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.models.cosmos3.golden.cases import FORWARD, TEXT_KV, Case
from phyai.models.cosmos3.request import Cosmos3ActionRequest, Cosmos3T2VRequest
from phyai.unipc import sigma_at

INPUTS = ("input_ids", "video", "action", "sound", "domain_id", "timestep")
LEAST = 1e-6
_TEXT = re.compile(r"mid\.und\.\d+\.[kv]")


def evaluation_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case: every velocity, position and intermediate tensor."""

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        names = [name for name in case.tensors if name not in INPUTS]
        return [_compare(case, name, records) for name in names]

    args: Any = case.generation_args()
    if case.of_policy:
        args = case.policy_args(load_sound="sound" in case.tensors)
    return [GoldenRun(case.stem, compare, args, evaluation_request(case))]


def evaluation_request(case: Case) -> Cosmos3ActionRequest | Cosmos3T2VRequest:
    """Return the request: one step at the case's timestep, guidance 1."""
    tensors = case.tensors
    video = tensors["video"][None]
    frames = tuple(case.fact("vision_condition_frames"))
    noise = {leaf: tensors[leaf][None] for leaf in ("video", "action", "sound") if leaf in tensors}
    common: dict[str, Any] = {
        "text_ids": tensors["input_ids"][None],
        "video_shape": tuple(video.shape[2:]),
        "fps": case.fact("fps"),
        # Level 0 is no start of a loop; the least one is within timestep 0 too.
        "sigmas": [sigma_at(int(tensors["timestep"].item())) or LEAST],
        "guidance_scale": 1.0,
        "noise": noise,
        "cond_frame_indexes": frames,
        "sound_frames": tensors["sound"].shape[1] if "sound" in tensors else None,
    }
    if not case.of_policy:
        return Cosmos3T2VRequest(
            **common,
            cond_latents=video if frames else None,
        )
    action = tensors["action"][None]
    rows = tuple(case.fact("action_condition_rows"))
    return Cosmos3ActionRequest(
        **common,
        cond_video_latents=video if frames else None,
        domain_id=int(tensors["domain_id"].item()),
        action_chunk=action.shape[1],
        # All channels count here: what a request does not use would be held at zero.
        raw_action_dim=action.shape[2],
        cond_action=action[:, list(rows)] if rows else None,
        cond_action_indexes=rows,
        action_start_frame_offset=case.fact("action_start_frame_offset"),
    )


def known_mask(case: Case, leaf: str) -> Tensor:
    """Return which elements of a leaf are given, where the stored velocity is zero."""
    mask = torch.zeros_like(case.tensors[leaf], dtype=torch.bool)
    if leaf == "video":
        mask[:, list(case.fact("vision_condition_frames"))] = True
    if leaf == "action":
        mask[list(case.fact("action_condition_rows"))] = True
    return mask


def _compare(case: Case, name: str, records: Records) -> Comparison:
    want = case.tensors[name]
    if name == "position_ids":
        name, record = name, "mid.position_ids"
    elif name.startswith("velocity_"):
        leaf = name.removeprefix("velocity_")
        found = records.get(f"steps.{leaf}.velocity")
        if not found:
            return unknown(name)
        velocity = torch.where(known_mask(case, leaf), 0.0, found[0][0])
        return absolute(name, velocity, want, FORWARD)
    else:
        record = name
    found = records.get(record)
    if not found:
        return unknown(name)
    got = found[0].reshape(want.shape) if found[0].numel() == want.numel() else found[0]
    if record == "mid.position_ids":
        return exact(name, got, want)
    return absolute(name, got, want, TEXT_KV if _TEXT.fullmatch(name) else FORWARD)
