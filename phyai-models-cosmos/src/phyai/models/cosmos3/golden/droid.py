"""DROID cases: what an observation becomes, and a whole request from it to served actions."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phyai.adapter import Adapter
from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, unknown
from phyai.models.cosmos3.args import Cosmos3PolicyArgs
from phyai.models.cosmos3.batch import HostRow
from phyai.models.cosmos3.checkpoint_files import text_tokenizer
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.golden.cases import LOOP, VAE, Case
from phyai.models.cosmos3.golden.denoise import Loop
from phyai.models.cosmos3.policy import Cosmos3PolicyProcessor, PolicyRow
from phyai.models.cosmos3.policy_rows import policy_rows
from phyai.models.cosmos3.processing.droid import CAMERAS, NUM_JOINTS, observed_image
from phyai.models.cosmos3.request import Cosmos3ActionRequest
from phyai.types import Observation

_VIEW = re.compile(r"(wrist|exterior_1|exterior_2) (\d+)x(\d+) k=(\d+)")
_CAMERA = dict(zip(("wrist", "exterior_1", "exterior_2"), CAMERAS, strict=True))
_SCALE = (4, 16)


def pattern(height: int, width: int, k: int) -> NDArray[np.uint8]:
    """Return the synthetic image of the fixtures' metadata, uint8 [height, width, 3]."""
    y, x, c = np.mgrid[:height, :width, :3]
    levels = (3 * x + 7 * y + 50 * c + 31 * k + (x * y) // 97) % 256
    return np.asarray(levels, dtype=np.uint8)


def _state(case: Case) -> NDArray[np.float32]:
    """Return what the robot reports, [8], or [T, 8] where the case has ticks from before."""
    joints = np.asarray(case.fact("joint"), dtype=np.float32).reshape(-1, NUM_JOINTS)
    gripper = np.asarray(case.fact("gripper"), dtype=np.float32).reshape(-1, 1)
    return np.concatenate([joints, gripper], axis=1)


@dataclass(frozen=True)
class Made:
    """What the processor makes of a case's observation."""

    request: Cosmos3ActionRequest
    meta: PolicyRow
    row: HostRow
    composed: NDArray[np.uint8]

    @property
    def canvas(self) -> Tensor:
        """The first frame on its canvas, uint8 [3, H, W]."""
        assert self.request.cond_video_pixels is not None
        frame = self.request.cond_video_pixels[0, :, 0]
        return ((frame + 1.0) * 127.5).round().to(torch.uint8)


def _made(
    processor: Cosmos3PolicyProcessor, observation: Observation, args: Cosmos3PolicyArgs
) -> Made:
    request, meta = processor.observation(observation)
    (row,) = policy_rows(request, processor.config, args, _SCALE)
    size = processor.robot.image_size if args.resize_image else None
    return Made(request, meta, row, observed_image(observation.images, size))


# ---------------------------------------------------------------- preprocessing


def preprocess_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case, at the released sizes and in both forms of the prompt."""

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        views = {_CAMERA[v]: pattern(int(h), int(w), int(k)) for v, h, w, k in _views(case)}
        observation = Observation(views, _state(case), case.text("instruction"))
        config = Cosmos3Config()  # the fixture has the released width of actions
        settings = _settings(case)
        args = case.policy_args(**settings)
        tokenizer = text_tokenizer(case.root, Cosmos3Config.from_folder(case.root), 1 << 15)
        forms = {}
        for form in ("plain", "json"):
            chosen = case.policy_args(**{**settings, "prompt_format": form})
            processor = Cosmos3PolicyProcessor(config, tokenizer, chosen)
            forms[form] = _made(processor, observation, args)
        return [_prepared(case, name, forms["plain"]) for name in case.tensors] + _facts(
            case, forms
        )

    return [GoldenRun(case.stem, compare)]


def _settings(case: Case) -> dict[str, Any]:
    """Return the arguments that a case's metadata name."""
    named = {"chunk": "chunk_size", "shift": "robot_shift", "domain_id": "domain"}
    same = ("fps", "resolution", "prompt_format", "history_length", "resize_image")
    names = {**named, **{name: name for name in same}}
    found = {own: case.facts[name] for name, own in names.items() if name in case.facts}
    if not {"use_state", "action_condition_rows"}.isdisjoint(case.facts):
        found["history_length"] = case.history
    return found


def _views(case: Case) -> list[tuple[str, str, str, str]]:
    found = _VIEW.findall(case.text("desc"))
    if len(found) != len(CAMERAS):
        raise CheckpointError(
            f"golden case {case.path.name} must say size and k of three views in its desc; got "
            f"{case.fact('desc')!r}. Copy the golden set again."
        )
    return list(found)


def _prepared(case: Case, name: str, made: Made) -> Comparison:
    want, canvas = case.tensors[name], made.canvas
    composed = torch.from_numpy(made.composed)
    if re.fullmatch(r"composed_\d+x\d+_sum_per_row", name):
        return exact(name, composed.long().sum(dim=(1, 2)), want)
    if name == "action_model":
        return exact(name, made.row.known["action"][1], want)
    if name == "image_size":
        return exact(name, torch.tensor(made.meta.canvas.image_size).to(want.dtype), want)
    if name == "domain_id":
        return exact(name, torch.tensor(made.row.domain), want)
    if name == "raw_action_dim":
        return exact(name, torch.tensor(made.request.raw_action_dim), want)
    if want.ndim != 3:
        return unknown(name)
    height, width = want.shape[:2] if want.shape[-1] == 3 else want.shape[1:]
    parts: dict[str, Callable[[], list[Tensor]]] = {
        "canvas0_bottom_strip": lambda: _strips(canvas[:, -height:], 2, width),
        "canvas0_right_strip": lambda: _strips(canvas[:, :, -width:], 1, height),
        "canvas0_corner": lambda: [canvas[:, -height:, -width:]],
        "composed_bottom_left_patch": lambda: _strips(composed[:, :width], 0, height),
        "composed_bottom_right_patch": lambda: [composed[-height:, -width:]],
    }
    if name not in parts:
        return unknown(name)
    allowed = _levels_off(made) if name.startswith("canvas0") else 0
    found = [absolute(name, part, want, allowed) for part in parts[name]()]
    return min(found, key=lambda c: c.error, default=unknown(name))


def _strips(pixels: Tensor, axis: int, count: int) -> list[Tensor]:
    """Return every run of ``count`` lines along an axis: a case says not where its strip lies."""
    return [pixels.narrow(axis, i, count) for i in range(pixels.shape[axis] - count + 1)]


def _levels_off(made: Made) -> int:
    """Return how far levels may be off: by 1 where the canvas is a bicubic resize."""
    canvas = made.meta.canvas
    whole = (canvas.content_height, canvas.content_width)
    return 0 if made.composed.shape[:2] == whole else 1


def _facts(case: Case, forms: dict[str, Made]) -> list[Comparison]:
    """Compare what the metadata holds: hashes, prompts, the plan."""
    made = forms["plain"]
    request, canvas = made.request, made.canvas
    frames = request.action_chunk - made.meta.history + 1
    got: dict[str, Any] = {
        "composed_sha256": _sha256(made.composed),
        # Of a resized canvas, whose levels may be off by 1, the strips decide.
        "canvas0_sha256": case.facts.get("canvas0_sha256")
        if _levels_off(made) and any(name.startswith("canvas0") for name in case.tensors)
        else _sha256(canvas.numpy()),
        "canvas_shape": [3, frames, *canvas.shape[1:]],
        "prompt_plain": made.meta.prompt,
        "prompt_json": forms["json"].meta.prompt,
        "plan": {
            "vision": [0],
            "action": list(request.cond_action_indexes or ()),
            "action_start_frame_offset": request.action_start_frame_offset,
        },
    }
    found = []
    for name, value in got.items():
        if name in case.facts:
            want = case.facts[name]
            if name == "prompt_json" and not isinstance(want, str):
                value = json.loads(value)
            found.append(exact(name, value, want))
    return found


def _sha256(array: NDArray[np.uint8]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


# ---------------------------------------------------------------- a whole request


def request_runs(case: Case) -> list[GoldenRun]:
    """Return the run of a case: an observation through the engine to its commands."""
    height, width = case.fact("image_hw")
    options = {
        "seed": case.fact("seed"),
        "num_steps": case.fact("steps"),
        "guidance_scale": case.fact("guidance"),
        "guidance_interval": case.facts.get("guidance_interval"),
    }
    observation = Observation(
        {"image": pattern(height, width, int(_said(case, "k", r"k=(\d+)")))},
        _state(case),
        case.text("instruction"),
        {name: value for name, value in options.items() if value is not None},
    )
    tier = _said(case, "tier", r"tier (\d+)")
    args = case.policy_args(**{"resolution": tier, "resize_image": False, **_settings(case)})

    def compare(adapter: Any, result: Any, records: Records) -> list[Comparison]:
        made = _made(adapter.processor, observation, args)
        loop = Loop(records)
        found = [_requested(case, name, made, loop, result, records) for name in case.tensors]
        return [*found, exact("prompt", result.info["prompt"], case.text("prompt"))]

    return [GoldenRun(case.stem, compare, args, observation)]


def _said(case: Case, name: str, words: str) -> str:
    """Return a number of the metadata, or of the words in its desc."""
    if name in case.facts:
        return str(case.facts[name])
    match = re.search(words, case.text("desc"))
    if match is None:
        raise CheckpointError(
            f"golden case {case.path.name} must say {name} of its image in its desc; got "
            f"{case.text('desc')!r}. Copy the golden set again."
        )
    return match[1]


def _requested(
    case: Case, name: str, made: Made, loop: Loop, result: Any, records: Records
) -> Comparison:
    want = case.tensors[name]
    if name == "canvas0":
        return absolute(name, made.canvas, want, _levels_off(made))
    if name == "image_size":
        return exact(name, torch.tensor(result.info["image_size"]).to(want.dtype), want)
    if name in ("cond_ids", "uncond_ids"):
        ids = made.request.text_ids if name == "cond_ids" else made.request.neg_text_ids
        assert ids is not None
        return exact(name, ids[0], want)
    if name == "action_model_in":
        return exact(name, made.row.known["action"][1], want)
    if name == "x0_latent_first":
        return absolute(name, records["vae.latents"][0][0, :, 0], want, VAE)
    if name.startswith("init_"):
        return absolute(name, loop.states(name.removeprefix("init_"))[0], want, LOOP)
    if name == "final_action_model":
        return absolute(name, loop.final("action")[:, : want.shape[1]], want, LOOP)
    if name == "final_video":
        return absolute(name, loop.final("video"), want, LOOP)
    if name == "server_action":
        return absolute(name, torch.from_numpy(result.actions), want, LOOP)
    return unknown(name)
