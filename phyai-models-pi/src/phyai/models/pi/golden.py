"""Golden cases of pi0 and pi0.5: official inputs through the engine, every other tensor compared.

Kinds are told by metadata and tensor names. Tolerances: fp32 cases as published with the fixtures;
bf16 cases against the case's own distance between the official bf16 and fp32 results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch import Tensor

from phyai.adapter import Adapter
from phyai.errors import CheckpointError
from phyai.golden import Comparison, GoldenRun, Records, absolute, exact, relative
from phyai.models.pi.adapter import PiAdapter, PiArgs, PiRequest
from phyai.models.pi.config import Model, PiConfig
from phyai.models.pi.images import check_image, model_image
from phyai.types import Observation, RTCOptions

Kind = Literal["base", "bf16", "policy", "e2e", "rtc_guided", "rtc_trained", "rl"]

# Largest absolute error allowed in float32; the fixtures' own recommendation where it has one.
TOLERANCES = {
    "actions": 5e-5,
    "prefix.embs": 2e-5,
    "prefix.k": 2e-5,
    "prefix.v": 2e-5,
    "prefix.last_hidden": 1e-4,
    "step0.suffix_embs": 2e-5,
    "step0.suffix_hidden": 2e-4,
    "steps.time": 1e-7,
    "steps.x_t": 5e-5,
    "steps.v_t": 2e-4,
    "steps.adarms_cond": 2e-5,
    "rtc.weights": 1e-6,
    "rtc.x1_t": 2e-4,
    "rtc.v_guided": 5e-4,
    "image": 2e-6,
    "pre.state": 1e-5,
    "model.actions": 5e-5,
    "post.actions": 2e-4,
}
BF16 = {"bf16_lerobot": 1.0, "bf16_openpi": 2.0}
"""Precision -> allowed multiple of the official bf16-to-fp32 distance (the fixtures' figure)."""
BF16_INTERMEDIATE = 4.0
"""Intermediates are noisier than the integrated action; measured 2 to 3 times its figure."""


@dataclass(frozen=True)
class Case:
    """A case file: its tensors, metadata and the folder with config, weights and tokenizer."""

    path: Path
    root: Path
    model: Model
    kind: Kind
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def outputs(self) -> dict[str, Tensor]:
        """Return every tensor that is not an input."""
        inputs = ("in.", "raw.", "noise")
        return {n: t for n, t in self.tensors.items() if not n.startswith(inputs)}


def read_case(path: Path, root: Path) -> Case:
    """Return a case; CheckpointError when its kind is unknown."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    model = metadata.get("kind")
    if model not in ("pi0", "pi05"):
        raise CheckpointError(
            f"golden case {path.name} must say kind 'pi0' or 'pi05' in its metadata; got {model!r}."
        )
    kind: Kind | None = None
    if "modes" in metadata:
        kind = "rl"
    elif metadata.get("mode") == "trained":
        kind = "rtc_trained"
    elif "schedule" in metadata:
        kind = "rtc_guided"
    elif "task" in metadata:
        kind = "e2e"
    elif "camera_order" in metadata:
        kind = "policy"
    elif "fp32.actions" in tensors:
        kind = "bf16"
    elif "in.images" in tensors:
        kind = "base"
    if kind is None:
        raise CheckpointError(
            f"golden case {path.name} is of no known kind; got metadata {metadata}."
        )
    return Case(path, root, cast(Model, model), kind, tensors, metadata)


def golden_runs(path: Path, root: Path) -> list[GoldenRun]:
    """Return the runs of one case file; empty for kinds that have no runtime yet (``rl``)."""
    case = read_case(path, root)
    build: dict[Kind, Callable[[Case], list[GoldenRun]]] = {
        "base": lambda c: [_model_run(c, "fp32", c.path.stem)],
        "rtc_guided": lambda c: [_model_run(c, "fp32", c.path.stem)],
        "rtc_trained": lambda c: [_model_run(c, "fp32", c.path.stem)],
        "bf16": lambda c: [_model_run(c, p, f"{c.path.stem}[{p}]") for p in BF16],
        "policy": _policy_runs,
        "e2e": _e2e_runs,
        "rl": lambda c: [],
    }
    return build[case.kind](case)


# ---------------------------------------------------------------- model requests


def _args(case: Case, precision: str, **changes: Any) -> PiArgs:
    from phyai.models.pi0.main_pi0 import PI0Args
    from phyai.models.pi05.main_pi05 import PI05Args

    cls: type[PiArgs] = PI0Args if case.model == "pi0" else PI05Args
    return cls(checkpoint_dir=str(case.root), max_batch_size=16, precision=precision, **changes)


def _request(case: Case, images: Tensor, masks: Tensor, state: Tensor | None) -> PiRequest:
    from phyai.models.pi0.main_pi0 import PI0Request
    from phyai.models.pi05.main_pi05 import PI05Request

    token_mask = case.tensors["in.token_mask"]
    fields: dict[str, Any] = {
        "pixel_values": images,
        "image_masks": masks,
        "input_ids": case.tensors["in.tokens"],
        "lang_lens": token_mask.sum(dim=1),
        "noise": case.tensors["in.noise"],
        "num_steps": int(case.metadata["num_steps"]),
        "rtc": _rtc(case),
    }
    if case.model == "pi0":
        return PI0Request(**fields, state=state)
    return PI05Request(**fields)


def _rtc(case: Case) -> RTCOptions | None:
    prev = case.tensors.get("in.prev_chunk_left_over")
    if prev is None:
        return None
    m = case.metadata
    if case.kind == "rtc_trained":
        return RTCOptions(prev, int(m["inference_delay"]), mode="trained")
    return RTCOptions(
        prev,
        int(m["inference_delay"]),
        int(m["execution_horizon"]),
        m["schedule"],
        float(m["max_guidance_weight"]),
        "guided",
    )


def _model_run(case: Case, precision: str, label: str) -> GoldenRun:
    changes: dict[str, Any] = {}
    if case.kind == "rtc_trained":
        config = PiConfig.from_folder(case.root, case.model)
        delay = int(case.metadata["rtc_training_max_delay"])
        changes["config"] = replace(config, rtc_training_max_delay=delay)
    request = _request(
        case,
        case.tensors["in.images"],
        case.tensors["in.image_masks"],
        case.tensors.get("in.state"),
    )

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        got = _observed(case, result, records)
        if case.kind == "bf16":
            return _compare_bf16(case, got, BF16[precision])
        return [_compare(case, name, got) for name in case.outputs()]

    return GoldenRun(label, compare, _args(case, precision, **changes), request)


def _observed(case: Case, actions: Tensor, records: Records) -> dict[str, Tensor]:
    """Return what the engine computed under the fixture's names, prefix tensors packed."""
    got = {"actions": actions.cpu()}
    for name in ("prefix.embs", "prefix.last_hidden", "prefix.positions", "prefix.lens"):
        if name in records:
            got[name] = records[name][0]
    for name, values in records.items():
        if name.startswith(("prefix.k.", "prefix.v.")):
            got[name] = values[0]
    for part in ("embs", "hidden"):
        suffix = records[f"step0.suffix_{part}"][0]
        state = [t.view(t.shape[0], 1, -1) for t in records.get(f"state.{part}", ())]
        got[f"step0.suffix_{part}"] = torch.cat([*state, suffix], dim=1)
    got["steps.x_t"] = torch.stack(records["steps.action.x"])
    got["steps.v_t"] = torch.stack(records["steps.action.velocity"])
    got["steps.time"] = torch.stack(records["steps.time"])
    if "steps.adarms_cond" in records:
        got["steps.adarms_cond"] = torch.stack(records["steps.adarms_cond"])
    if "rtc.v_guided" in records:
        got["rtc.v_guided"] = torch.stack(records["rtc.v_guided"])
        got["rtc.x1_t"] = torch.stack(records["rtc.x_hat"])
        got["rtc.weights"] = records["rtc.weights"][0][0]
        got["rtc.guidance_weight"] = torch.stack([g[0] for g in records["rtc.gain"]])
    return got


def _compare(case: Case, name: str, got: Mapping[str, Tensor]) -> Comparison:
    """Return the comparison of one fixture tensor; an unknown name is infinitely wrong."""
    want, valid = case.tensors[name], case.tensors["prefix.pad_mask"]
    if name == "prefix.pad_mask":
        return exact(name, got["prefix.lens"], valid.sum(dim=1))
    if name == "prefix.position_ids":
        return exact(name, got["prefix.positions"], want[valid])
    if name == "rtc.guidance_weight":
        return absolute(name, got[name], want, 1e-5 * float(want.abs().max()))
    base = name.rsplit(".", 1)[0] if name.startswith(("prefix.k.", "prefix.v.")) else name
    if base not in TOLERANCES or name not in got:
        return Comparison(f"{name} (nothing to compare it with)", float("inf"), 0.0)
    if base in ("prefix.k", "prefix.v"):
        want = want.transpose(1, 2)
    if name.startswith("prefix."):
        want = want[valid]
    return absolute(name, got[name], want, TOLERANCES[base])


def _compare_bf16(case: Case, got: Mapping[str, Tensor], factor: float) -> list[Comparison]:
    """Actions against the fp32 result within the official distance; the rest against official bf16.

    The fixtures' generator rounded the float32 parts' weights to bf16 as well, which no released
    loading path does: a small, known part of the distance of intermediates.
    """
    official, fp32 = case.tensors["actions"], case.tensors["fp32.actions"]
    figure = factor * float((official - fp32).norm() / fp32.norm())
    worst = factor * float((official - fp32).abs().max())
    rows = [
        relative("fp32.actions", got["actions"], fp32, figure),
        absolute("fp32.actions (max)", got["actions"], fp32, worst),
        # both sides are up to one figure away from the fp32 result
        relative("actions", got["actions"], official, 2.0 * figure),
    ]
    valid = case.tensors["prefix.pad_mask"]
    for name, want in case.outputs().items():
        if name in ("prefix.pad_mask", "prefix.position_ids", "steps.time"):
            rows.append(_compare(case, name, got))
        elif name not in ("actions", "fp32.actions"):
            if name not in got:
                rows.append(Comparison(f"{name} (nothing to compare it with)", float("inf"), 0.0))
                continue
            if name.startswith(("prefix.k.", "prefix.v.")):
                want = want.transpose(1, 2)
            if name.startswith("prefix."):
                want = want[valid]
            rows.append(relative(name, got[name], want, BF16_INTERMEDIATE * figure))
    return rows


# ---------------------------------------------------------------- policy and end to end


def _policy_runs(case: Case) -> list[GoldenRun]:
    """Raw float images and ready tokens; the processor resizes, the engine infers, dims are cut."""
    order: list[str] = json.loads(case.metadata["camera_order"])
    present = [name for name in order if f"in.{name}" in case.tensors]
    config = PiConfig.from_folder(case.root, case.model)
    size = config.vision.image_size
    rows = case.tensors["in.noise"].shape[0]
    images = torch.stack(
        [
            torch.stack([_image(case.tensors[f"in.{name}"][row], name, size) for name in present])
            for row in range(rows)
        ]
    )
    blank = torch.full((rows, len(order) - len(present), 3, size, size), -1.0)
    masks = torch.zeros(rows, len(order), dtype=torch.bool)
    masks[:, : len(present)] = True
    state = case.tensors.get("in.state_unpadded")
    padded = None
    if state is not None and case.model == "pi0":
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
                found.append(Comparison(f"{name} (unknown)", float("inf"), 0.0))
        return found

    request = _request(case, everything, masks, padded)
    return [GoldenRun(case.path.stem, compare, _args(case, "fp32"), request, records=())]


def _image(pixels: Tensor, name: str, size: int) -> Tensor:
    return model_image(check_image(pixels.numpy(), name), (size, size), "lerobot")


def _e2e_runs(case: Case) -> list[GoldenRun]:
    """A raw observation through the checkpoint's own pre- and post-processor files."""
    relative_actions = case.metadata.get("relative_actions", "False") == "True"
    images = {
        name.removeprefix("raw."): tensor.numpy()
        for name, tensor in case.tensors.items()
        if name.startswith("raw.observation.images.")
    }
    observation = Observation(
        images=images,
        state=case.tensors["raw.observation.state"].numpy(),
        prompt=case.metadata["task"],
        options={
            "noise": case.tensors["noise"][0],
            "num_steps": int(case.metadata["num_steps"]),
        },
    )
    args = _args(
        case,
        "fp32",
        processor_dir=_processor_folder(case.root, relative_actions),
        tokenizer=case.root / "tokenizer",
    )

    def compare(adapter: Adapter | None, result: Any, records: Records) -> list[Comparison]:
        row = cast(PiAdapter, adapter).processor.row(observation)
        prompts: Sequence[str] = [row.prompt_text]
        found = [exact("prompt", str(list(prompts)), case.metadata["prompt_after_preprocess"])]
        for name, want in case.outputs().items():
            if name == "pre.tokens":
                found.append(exact(name, row.tokens[None, : want.shape[1]], want))
            elif name == "pre.token_mask":
                mask = torch.arange(want.shape[1])[None] < row.length
                found.append(exact(name, mask, want))
            elif name == "pre.state":
                got = row.state[None, : want.shape[1]]
                found.append(absolute(name, got, want, TOLERANCES[name]))
            elif name == "model.actions":
                got = torch.from_numpy(result.model_actions)[None, :, : want.shape[-1]]
                found.append(absolute(name, got, want, TOLERANCES[name]))
            elif name == "post.actions":
                got = torch.from_numpy(result.actions)[None]
                found.append(absolute(name, got, want, TOLERANCES[name]))
            else:
                found.append(Comparison(f"{name} (unknown)", float("inf"), 0.0))
        return found

    return [GoldenRun(case.path.stem, compare, args, observation, records=())]


def _processor_folder(root: Path, relative_actions: bool) -> Path:
    """Return the processor folder whose relative-action step is switched as the case says."""
    for file in sorted(root.glob("**/policy_preprocessor.json")):
        steps = json.loads(file.read_text())["steps"]
        enabled = any(
            step.get("registry_name") == "relative_actions_processor"
            and step.get("config", {}).get("enabled", False)
            for step in steps
        )
        if enabled == relative_actions:
            return file.parent
    raise CheckpointError(
        f"golden set {root} must hold processor files with relative actions "
        f"{'on' if relative_actions else 'off'}; got none."
    )
