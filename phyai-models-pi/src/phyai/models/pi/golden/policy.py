"""Golden cases that start from raw images: a policy's, and an observation's end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from phyai.adapter import Adapter
from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, Records, absolute, close, exact, unknown
from phyai.models.pi.adapter import PiAdapter
from phyai.models.pi.config import PiConfig
from phyai.models.pi.golden.case import (
    HOST_ATOL,
    HOST_RTOL,
    TOLERANCES,
    Case,
    beside,
    case_args,
    case_request,
)
from phyai.models.pi.processing.images import check_image, model_image
from phyai.models.pi.processing.processor import Processor
from phyai.models.pi.processing.processor_files import PREPROCESSOR_FILE, read_processor_files
from phyai.types import Observation

_CAMERA = re.compile(r"observation\.images\.[\w.-]+")


def policy_runs(case: Case) -> list[GoldenRun]:
    """Raw float images and ready tokens; the processor resizes, the engine infers, dims are cut."""
    order: list[str] = json.loads(case.meta("camera_order"))
    present = [name for name in order if f"in.{name}" in case.tensors]
    config = PiConfig.from_folder(case.root, case.adapter.model)
    size = config.vision.image_size
    rows = case.tensor("in.noise").shape[0]
    images = torch.stack(
        [
            torch.stack([_image(case.tensor(f"in.{name}")[row], name, size) for name in present])
            for row in range(rows)
        ]
    )
    blank = torch.full((rows, len(order) - len(present), 3, size, size), -1.0)
    masks = torch.zeros(rows, len(order), dtype=torch.bool)
    masks[:, : len(present)] = True
    state = case.tensors.get("in.state_unpadded")
    padded = None
    if state is not None and case.adapter.needs_state:
        padded = torch.zeros(rows, config.max_state_dim)
        padded[:, : state.shape[1]] = state
    everything = torch.cat([images, blank], dim=1)

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        found = []
        for name, want in case.outputs().items():
            if name == "actions":
                got = result.cpu()[..., : want.shape[-1]]
                found.append(absolute(name, got, want, TOLERANCES["actions"]))
            elif name.startswith("mid.image_mask_"):
                found.append(exact(name, masks[:, int(name.rsplit("_", 1)[1])], want))
            elif name.startswith("mid.image_"):
                got = everything[:, int(name.rsplit("_", 1)[1])]
                found.append(absolute(name, got, want, TOLERANCES["image"]))
            else:
                found.append(unknown(name))
        return found

    request = case_request(case, everything, masks, padded)
    return [GoldenRun(case.path.stem, compare, case_args(case, "fp32"), request, records=())]


def _image(pixels: Tensor, name: str, size: int) -> Tensor:
    return model_image(check_image(pixels.numpy(), name), (size, size), "lerobot")


def e2e_runs(case: Case) -> list[GoldenRun]:
    """A raw observation through the checkpoint's own pre- and post-processor files."""
    prefix = "raw.observation.images."
    observation = Observation(
        images={
            name.removeprefix("raw."): tensor.numpy()
            for name, tensor in case.tensors.items()
            if name.startswith(prefix)
        },
        state=case.tensor("raw.observation.state").numpy(),
        prompt=case.meta("task"),
        options={"noise": case.tensor("noise")[0], "num_steps": int(case.meta("num_steps"))},
    )
    args = case_args(
        case,
        "fp32",
        processor_dir=_processor_folder(case),
        tokenizer=beside(case.path, case.root, "tokenizer"),
    )

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        return _compare_e2e(case, cast(PiAdapter, adapter).processor, observation, result)

    return [GoldenRun(case.path.stem, compare, args, observation, records=())]


def _compare_e2e(
    case: Case, processor: Processor, observation: Observation, result: Any
) -> list[Comparison]:
    row = processor.row(observation)
    sent = row.image_mask.tolist()
    missing = {name for name, on in zip(processor.config.cameras, sent, strict=True) if not on}
    found = [exact("prompt", str([row.prompt_text]), case.meta("prompt_after_preprocess"))]
    if "missing_camera" in case.metadata:
        official = set(_CAMERA.findall(case.metadata["missing_camera"]))
        found.append(exact("missing_camera", missing, official))
    for name, want in case.outputs().items():
        if name == "pre.tokens":
            found.append(exact(name, row.tokens[None], want))
        elif name == "pre.token_mask":
            found.append(exact(name, torch.arange(len(row.tokens))[None] < row.length, want))
        elif name == "pre.state":
            padded = torch.zeros(1, len(row.state))
            padded[:, : want.shape[1]] = want
            found.append(close(name, row.state[None], padded, atol=HOST_ATOL, rtol=HOST_RTOL))
        elif name == "model.actions":
            got = torch.from_numpy(result.model_actions)[None, :, : want.shape[-1]]
            found.append(absolute(name, got, want, TOLERANCES[name]))
        elif name == "post.actions":
            got = torch.from_numpy(result.actions)[None]
            found.append(absolute(name, got, want, TOLERANCES[name]))
            model_actions = case.tensor("model.actions")[0].numpy()
            got = torch.from_numpy(processor.actions(model_actions, row))[None]
            label = f"{name} (of the official model.actions)"
            found.append(close(label, got, want, atol=HOST_ATOL, rtol=HOST_RTOL))
        else:
            found.append(unknown(name))
    return found


def _processor_folder(case: Case) -> Path:
    """Return the processor folder whose relative-action steps are switched as the case says."""
    relative_actions = case.metadata.get("relative_actions", "False") == "True"
    for file in sorted(case.root.rglob(PREPROCESSOR_FILE)):
        files = read_processor_files(file.parent)
        if files is not None and files.relative == relative_actions:
            return file.parent
    raise CheckpointError(
        f"golden set {case.root} must hold processor files with relative actions "
        f"{'on' if relative_actions else 'off'}; got none. Copy the golden set again."
    )
