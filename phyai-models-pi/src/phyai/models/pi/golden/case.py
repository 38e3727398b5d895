"""One golden case file: its tensors, kind, request and the folder of its set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phyai.errors import CheckpointError
from phyai.models.pi.adapter import PiAdapter, PiArgs, PiRequest
from phyai.models.pi.config import PiConfig
from phyai.types import RTCOptions

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
    "model.actions": 5e-5,
    "post.actions": 2e-4,
}
# Absolute and relative tolerance of host-side float32 arithmetic: normalisation, relative actions.
HOST_ATOL, HOST_RTOL = 1e-6, 1e-6


@dataclass(frozen=True)
class Case:
    """A model case: its tensors, metadata and the folder with config, weights and tokenizer."""

    path: Path
    root: Path
    adapter: type[PiAdapter]
    kind: Kind
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]

    def outputs(self) -> dict[str, Tensor]:
        """Return every tensor that is not an input."""
        inputs = ("in.", "raw.")
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if not name.startswith(inputs) and name != "noise"
        }

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that this kind of case must have.  Raises: CheckpointError."""
        if name not in self.tensors:
            raise CheckpointError(
                f"golden case {self.path.name} of kind {self.kind} must hold the tensor {name!r}; "
                f"got {', '.join(sorted(self.tensors))}. Copy the golden set again."
            )
        return self.tensors[name]

    def meta(self, key: str) -> str:
        """Return an entry of the metadata.  Raises: CheckpointError."""
        if key not in self.metadata:
            raise CheckpointError(
                f"golden case {self.path.name} of kind {self.kind} must have {key!r} in its "
                f"metadata; got {', '.join(sorted(self.metadata))}. Copy the golden set again."
            )
        return self.metadata[key]


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a case file; CheckpointError when it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {n: file.get_tensor(n) for n in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"golden case {path.name} must be a readable safetensors file; got {error}. "
            "Copy the golden set again."
        ) from error


def read_case(path: Path, root: Path, adapter: type[PiAdapter]) -> Case:
    """Return a model case; CheckpointError when it is another model's or its kind is unknown."""
    tensors, metadata = read_tensors(path)
    model = metadata.get("kind")
    if model != adapter.model:
        raise CheckpointError(
            f"golden case {path.name} must say kind {adapter.model!r} in its metadata; got "
            f"{model!r}. Use the plugin of its model."
        )
    kind = next((kind for kind, fits in _KINDS.items() if fits(tensors, metadata)), None)
    if kind is None:
        raise CheckpointError(
            f"golden case {path.name} must be of a known kind ({', '.join(_KINDS)}); got metadata "
            f"{metadata} and tensors {', '.join(tensors)}. Remove it from the set."
        )
    return Case(path, root, adapter, kind, tensors, metadata)


Sign = Callable[[Mapping[str, Tensor], Mapping[str, str]], bool]
_KINDS: dict[Kind, Sign] = {
    "rl": lambda tensors, meta: "modes" in meta or "in.step_noise" in tensors,
    "rtc_trained": lambda tensors, meta: meta.get("mode") == "trained",
    "rtc_guided": lambda tensors, meta: "in.prev_chunk_left_over" in tensors,
    "e2e": lambda tensors, meta: "task" in meta,
    "policy": lambda tensors, meta: "camera_order" in meta,
    "bf16": lambda tensors, meta: "fp32.actions" in tensors,
    "base": lambda tensors, meta: "in.images" in tensors,
}


def case_args(case: Case, precision: str, **changes: Any) -> PiArgs:
    """Return the adapter arguments that load the set's checkpoint and fit the case's batch."""
    args_cls = cast(type[PiArgs], case.adapter.args_cls)
    rows, noise, images = 16, case.tensors.get("in.noise"), case.tensors.get("in.images")
    if noise is not None:
        rows = max(rows, noise.shape[0])
    config = PiConfig.from_folder(case.root, case.adapter.model)
    if images is not None and images.shape[1] > len(config.cameras):
        changes["inputs_image_shape"] = [list(images.shape[2:])] * images.shape[1]
    return args_cls(
        checkpoint_dir=str(case.root), max_batch_size=rows, precision=precision, **changes
    )


def case_request(case: Case, images: Tensor, masks: Tensor, state: Tensor | None) -> PiRequest:
    """Return the prepared request of a case with token tensors.

    Shapes: images [B, C, 3, S, S] in [-1, 1]; masks [B, C] bool; state [B, max_state_dim].
    """
    fields: dict[str, Any] = {
        "pixel_values": images,
        "image_masks": masks,
        "input_ids": case.tensor("in.tokens"),
        "lang_lens": case.tensor("in.token_mask").sum(dim=1),
        "noise": case.tensor("in.noise"),
        "num_steps": int(case.meta("num_steps")),
        "rtc": _rtc(case),
    }
    if case.adapter.needs_state:
        fields["state"] = state
    return case.adapter.request_cls(**fields)


def _rtc(case: Case) -> RTCOptions | None:
    prev = case.tensors.get("in.prev_chunk_left_over")
    if prev is None:
        return None
    delay = int(case.meta("inference_delay"))
    if case.kind == "rtc_trained":
        return RTCOptions(prev, delay, mode="trained")
    return RTCOptions(
        prev,
        delay,
        int(case.meta("execution_horizon")),
        case.meta("schedule"),
        float(case.meta("max_guidance_weight")),
        "guided",
    )


def beside(path: Path, root: Path, name: str) -> Path:
    """Return ``name`` in the folder of a case file or the nearest one above it, up to ``root``.

    Raises: CheckpointError when none of these folders holds it.
    """
    for folder in _folders(path.absolute(), root.absolute()):
        if (folder / name).exists():
            return folder / name
    raise CheckpointError(
        f"golden case {path.name} needs {name!r} beside it or above it, up to {str(root)!r}; "
        "got none. Copy the golden set again."
    )


def _folders(path: Path, root: Path) -> tuple[Path, ...]:
    within = tuple(folder for folder in path.parents if folder.is_relative_to(root))
    return within or (path.parent, root)
