"""Whole pipelines: prompts, what they start from, every step, latents, pixels, sound, actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.models.cosmos3.generation import Cosmos3Processor
from phyai.models.cosmos3.golden.cases import LOOP, SIGMAS, SOUND_OF_LOOP, VAE, Case
from phyai.models.cosmos3.golden.denoise import Loop
from phyai.models.cosmos3.golden.parts import sound_decoder
from phyai.models.cosmos3.policy import Cosmos3PolicyProcessor
from phyai.models.cosmos3.request import Cosmos3ActionRequest, Cosmos3T2VRequest
from phyai.models.cosmos3.request_rows import sampling_of
from phyai.models.cosmos3.scheduler_files import SCHEDULES, read_scheduler
from phyai.models.cosmos3.text.tokenizer import TextTokenizer
from phyai.unipc import sigmas_of, timestep

Request = Cosmos3ActionRequest | Cosmos3T2VRequest


def pipeline_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case; its prompts and ids are made by the public processors."""
    args: Any = case.generation_args()
    if case.of_policy:
        args = case.policy_args(
            decode_video="pixels_decoded" in case.tensors, load_sound="init_sound" in case.tensors
        )
    request, tokenizer = (_action if case.of_policy else _generation)(case)

    def compare(adapter: Any, result: Any, records: Records) -> list[Comparison]:
        loop = Loop(records)
        sampling = sampling_of(request, args, read_scheduler(case.root))
        levels = sigmas_of(sampling.grid, sampling.num_steps)
        inputs = ("init_", "in_")
        names = [name for name in case.tensors if not name.startswith(inputs)]
        compared = [_compare(case, name, request, loop, result, adapter, levels) for name in names]
        return compared + [
            exact(name, tokenizer.text(_ids(request, name)), case.text(name))
            for name in ("text_cond", "text_uncond")
            if name in case.facts
        ]

    return [GoldenRun(case.stem, compare, args, request)]


def _noise(case: Case) -> dict[str, Tensor]:
    """Return the stored noise, rows first."""
    found = {}
    for name, tensor in case.tensors.items():
        if name.startswith("init_"):
            leaf = name.removeprefix("init_")
            dims = {"video": 5, "sound": 3, "action": 3}.get(leaf, tensor.ndim)
            found[leaf] = tensor if tensor.ndim == dims else tensor[None]
    return found


def _sampling(case: Case) -> dict[str, Any]:
    return {
        "guidance_scale": float(case.fact("guidance_scale")),
        "flow_shift": float(case.fact("flow_shift")),
        "schedule": _schedule(case),
        "guidance_interval": case.facts.get("guidance_interval"),
        "noise": _noise(case),
    }


def _schedule(case: Case) -> str:
    """Return the schedule a case names, else that of diffusers for this checkpoint's index."""
    named = case.facts.get("schedule")
    if named in SCHEDULES:
        return str(named)
    if case.fact("karras"):
        return "karras"
    return "native" if read_scheduler(case.root).native else "diffusers_flow"


def _negative(case: Case) -> str | None:
    unsaid = case.facts.get("negative_prompt") is None
    return None if unsaid else case.text("negative_prompt")


def _generation(case: Case) -> tuple[Request, TextTokenizer]:
    system = case.facts.get("use_system_prompt")
    processor = Cosmos3Processor.from_checkpoint(case.root, system_prompt=system)
    image, video = (_frames(case, name) for name in ("in_image", "in_video"))
    request = processor(
        case.text("prompt"),
        negative_prompt=_negative(case),
        image=image,
        video=video,
        cond_frame_indexes=_indexes(case, video),
        condition_video_keep=case.facts.get("condition_video_keep") or "first",
        num_frames=case.fact("num_frames"),
        fps=case.facts.get("fps"),
        height=case.fact("height"),
        width=case.fact("width"),
        sound=bool(case.facts.get("enable_sound", False)),
        num_steps=case.fact("num_inference_steps"),
        **_sampling(case),
    )
    assert processor.tokenizer is not None
    return request, processor.tokenizer


def _action(case: Case) -> tuple[Request, TextTokenizer]:
    asked = case.fact("action")
    processor = Cosmos3PolicyProcessor.from_checkpoint(case.root)
    request = processor.task(
        case.text("prompt"),
        mode=asked["mode"],
        image=_frames(case, "in_action_image"),
        video=_frames(case, "in_action_video"),
        raw_action_dim=_width(case),
        negative_prompt=_negative(case) or "",
        raw_actions=case.tensors.get("in_raw_actions"),
        domain=asked["domain_name"],
        chunk_size=asked["chunk_size"],
        fps=float(case.fact("fps")),
        resolution_tier=asked["resolution_tier"],
        view_point=asked["view_point"],
        sound_frames=_sound_frames(case),
        num_inference_steps=case.fact("num_inference_steps"),
        **_sampling(case),
    )
    assert processor.tokenizer is not None
    return request, processor.tokenizer


def _frames(case: Case, name: str) -> Tensor | None:
    """Return pixels, channels last; cases store images with either axis last."""
    pixels = case.tensors.get(name)
    if pixels is None or pixels.shape[-1] == 3:
        return pixels
    return pixels.movedim(-3, -1)


def _indexes(case: Case, video: Tensor | None) -> Any:
    """Return the latent frames a clip gives; None = the usual ones."""
    names = ("cond_frame_indexes", "condition_frame_indexes_vision")
    named = [case.facts[name] for name in names if case.facts.get(name) is not None]
    return named[0] if named and video is not None else None


def _width(case: Case) -> int | None:
    """Return the action channels in use; None = those of the case's domain."""
    asked, tensors = case.fact("action"), case.tensors
    for found in (asked.get("raw_action_dim"), case.facts.get("raw_action_dim")):
        if found is not None:
            return int(found)
    for name in ("in_raw_actions", "final_action"):
        if name in tensors:
            return int(tensors[name].shape[-1])
    return None


def _sound_frames(case: Case) -> int | None:
    sound = case.tensors.get("init_sound")
    return None if sound is None else sound.shape[-1]


def _ids(request: Request, name: str) -> Tensor:
    ids = request.neg_text_ids if "uncond" in name else request.text_ids
    assert ids is not None
    return ids[0]


def _compare(
    case: Case,
    name: str,
    request: Request,
    loop: Loop,
    result: Any,
    adapter: Any,
    levels: tuple[float, ...],
) -> Comparison:
    want = case.tensors[name]
    if name in ("cond_ids", "uncond_ids"):
        return exact(name, _ids(request, name), want)
    if name == "sigmas":
        return absolute(name, torch.tensor(levels), want, SIGMAS)
    if name == "timesteps":
        return exact(name, torch.tensor([timestep(s) for s in levels[:-1]]), want)
    if name.startswith("step_"):
        return _near(name, loop.states(name.removeprefix("step_"))[1:], want, LOOP)
    if name == "final_action":
        return absolute(name, result["action"][0], want, LOOP)
    if name.startswith("final_"):
        return _near(name, loop.final(name.removeprefix("final_")), want, LOOP)
    if name == "pixels_decoded":
        pixels = (
            result["pixels" if case.of_policy else "video"] if isinstance(result, dict) else result
        )
        return _near(name, pixels * 2.0 - 1.0, want, VAE)
    if name == "waveform":
        return _near(name, _waveform(case, result), want, SOUND_OF_LOOP)
    return unknown(name)


def _near(name: str, got: Tensor, want: Tensor, tolerance: float) -> Comparison:
    """Compare; an axis of one row more or less is no difference."""
    same = [n for n in got.shape if n != 1] == [n for n in want.shape if n != 1]
    return absolute(name, got.reshape(want.shape) if same else got, want, tolerance)


def _waveform(case: Case, result: Any) -> Tensor:
    """Return the sound of a result; the policy gives its latents, which are decoded here."""
    if "sound" in result:
        wave: Tensor = result["sound"]
        return wave
    return sound_decoder(case).decode(result["sound_latents"])
