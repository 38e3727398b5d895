"""Whole denoise loops of the policy, from latents and token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phyai.adapter import Adapter
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.models.cosmos3.golden.cases import LOOP, SIGMAS, Case
from phyai.models.cosmos3.processing.droid import joint_actions
from phyai.models.cosmos3.request import Cosmos3ActionRequest
from phyai.unipc import sigmas_of, timestep

INPUTS = ("cond_ids", "uncond_ids", "x0_video", "state_action")
BARELY_GUIDED = 1.0 + 2.0**-20
_LEAVES = {"v": "video", "a": "action"}


def denoise_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case; without guidance one more, which evaluates both branches."""
    request = denoise_request(case)
    guided = bool(case.fact("guidance") != 1.0)
    runs = [_run(case, "", request, guided=guided)]
    if not guided and request.neg_text_ids is not None:
        # The other branch's velocities are stored too; such a scale evaluates it and counts little.
        both = replace(request, guidance_scale=BARELY_GUIDED)
        runs.append(_run(case, "[both branches]", both, guided=True))
    return runs


def denoise_request(case: Case) -> Cosmos3ActionRequest:
    """Return the request of a case; its noise is drawn from the seed."""
    tensors, history = case.tensors, case.history
    negative = tensors.get("uncond_ids")
    state = tensors["state_action"][None]
    return Cosmos3ActionRequest(
        text_ids=tensors["cond_ids"][None],
        neg_text_ids=None if negative is None else negative[None],
        video_shape=tuple(case.fact("grid")),
        fps=case.fact("fps"),
        num_inference_steps=case.fact("steps"),
        guidance_scale=case.fact("guidance"),
        seed=case.fact("seed"),
        flow_shift=case.fact("shift"),
        schedule="native",
        domain_id=case.fact("domain_id"),
        action_chunk=case.fact("action_len"),
        raw_action_dim=case.fact("raw_action_dim"),
        cond_video_latents=tensors["x0_video"][None],
        cond_action=state[:, :history] if history else None,
        cond_action_indexes=tuple(range(history)),
        action_start_frame_offset=case.facts.get("action_start_frame_offset", 1 - history),
        guidance_interval=case.facts.get("guidance_interval"),
    )


def _run(case: Case, label: str, request: Cosmos3ActionRequest, *, guided: bool) -> GoldenRun:
    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        found = Loop(records)
        names = [name for name in case.tensors if name not in INPUTS]
        if not guided:
            names = [name for name in names if not name.startswith("step.uncond_")]
        return [_compare(case, name, found, result) for name in names]

    return GoldenRun(f"{case.stem}{label}", compare, case.policy_args(), request)


class Loop:
    """What a solver loop of one row recorded."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def states(self, leaf: str) -> Tensor:
        """Return x before the first step and after each, [N + 1, ...]."""
        return torch.stack([*self._rows(f"steps.{leaf}.x"), *self._rows(f"result.{leaf}")])

    def velocities(self, leaf: str, branch: str = "") -> Tensor:
        """Return the network's answers, [N, ...]."""
        return torch.stack(self._rows(f"steps.{branch}{leaf}.velocity"))

    def final(self, leaf: str) -> Tensor:
        return self._rows(f"result.{leaf}")[0]

    def _rows(self, name: str) -> list[Tensor]:
        return [tensor[0] for tensor in self.records[name]]


def _compare(case: Case, name: str, loop: Loop, result: Any) -> Comparison:
    want, raw = case.tensors[name], case.fact("raw_action_dim")
    grid = f"native:{case.fact('shift')}"
    levels = sigmas_of(grid, case.fact("steps"))
    if name == "sigmas":
        return absolute(name, torch.tensor(levels), want, SIGMAS)
    if name == "timesteps":
        return exact(name, torch.tensor([timestep(s) for s in levels[:-1]]), want)
    if name == "final_action_model":
        return absolute(name, result["action"][0], want, LOOP)
    if name == "final_video":
        return absolute(name, loop.final("video"), want, LOOP)
    if name == "server_action":
        served = joint_actions(loop.final("action").numpy(), case.history, raw)
        return absolute(name, torch.from_numpy(served), want, LOOP)
    if name.startswith("init_"):
        return absolute(name, loop.states(name.removeprefix("init_"))[0], want, LOOP)
    if name.startswith("step.") and name[-2:] in ("_v", "_a"):
        leaf, part = _LEAVES[name[-1]], name.removeprefix("step.")[:-2]
        if part == "lat":
            return absolute(name, loop.states(leaf)[1:], want, LOOP)
        branch = {"cond": "", "uncond": "uncond."}.get(part)
        if branch is not None:
            velocity = loop.velocities(leaf, branch)
            return absolute(name, torch.where(_given(case, leaf), 0.0, velocity), want, LOOP)
    return unknown(name)


def _given(case: Case, leaf: str) -> Tensor:
    """Return which elements are given; unused channels of actions are."""
    if leaf == "video":
        mask = torch.zeros_like(case.tensors["x0_video"], dtype=torch.bool)
        mask[:, 0] = True
        return mask
    mask = torch.zeros_like(case.tensors["state_action"], dtype=torch.bool)
    mask[:, case.fact("raw_action_dim") :] = True
    mask[: case.history] = True
    return mask
