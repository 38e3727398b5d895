"""PI05Processor: the batch-shaped processor other PhyAI releases call, over our own functions.

It reads and writes LeRobot's processor files. Unlike ``Processor`` it takes a fixed number of
images by position and knows no camera names, masks or robots. No state is kept between calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from torch import Tensor

from phyai.errors import CheckpointNotFound, ConfigError, RequestError
from phyai.models.pi.config import default_normalization
from phyai.models.pi.processing.images import resize_with_pad_float
from phyai.models.pi.processing.norm_stats import ACTION, STATE, Stats
from phyai.models.pi.processing.normalize import needed_stats
from phyai.models.pi.processing.normalizers import LerobotNormalizer
from phyai.models.pi.processing.processor_files import (
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    STATE_PROMPT_STEP,
    NormStep,
    read_processor_files,
)
from phyai.models.pi.processing.prompts import state_prompt
from phyai.models.pi.processing.tokenizer import DEFAULT_TOKENIZER, PromptTokenizer

_STATE_FILES = {
    PREPROCESSOR_FILE: "policy_preprocessor_step_2_normalizer_processor.safetensors",
    POSTPROCESSOR_FILE: "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
}


@dataclass(frozen=True)
class PI05ProcessedInputs:
    """Fields of a PI05Request: pixel_values [B, N, C, S, S], input_ids [B, L], lang_lens [B]."""

    pixel_values: Tensor
    input_ids: Tensor
    lang_lens: Tensor


class PI05Processor:
    """Pre- and postprocessing of pi0.5 for callers that build model requests themselves.

    dataset_stats: feature -> statistic -> numbers (``observation.state``, ``action``); None =
    identity. normalize_pixels: map uint8 or [0, 1] images to [-1, 1]; False passes float images
    on as they are and scales uint8 to [0, 1], so the caller must bring [-1, 1] himself.
    image_pad_value: border before that map; 0 is black for [0, 1] images.
    """

    def __init__(
        self,
        *,
        image_size: int = 224,
        num_channels: int = 3,
        num_images: int = 3,
        tokenizer_max_length: int = 200,
        action_dim: int | None = None,
        tokenizer_name: str = DEFAULT_TOKENIZER,
        tokenizer: PromptTokenizer | str | Path | None = None,
        dataset_stats: Mapping[str, Mapping[str, Any]] | None = None,
        normalize_pixels: bool = False,
        image_pad_value: float = 0.0,
        device: torch.device | str = "cpu",
        params_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        stats = _stats(dataset_stats)
        features = {
            name: kind
            for name, kind in ((STATE, "STATE"), (ACTION, "ACTION"))
            if stats is not None and name in stats
        }
        step = NormStep(features, default_normalization("pi05"), 1e-8, stats)
        self._normalizer = LerobotNormalizer(step, step)
        self.image_size = image_size
        self.num_channels = num_channels
        self.num_images = num_images
        self.tokenizer_max_length = tokenizer_max_length
        self.action_dim = action_dim
        self.tokenizer_name = tokenizer_name
        self.normalize_pixels = normalize_pixels
        self.image_pad_value = image_pad_value
        self.device = torch.device(device)
        self.params_dtype = params_dtype
        if isinstance(tokenizer, str | Path):
            tokenizer = PromptTokenizer.from_path(tokenizer)
        self.tokenizer = tokenizer or PromptTokenizer.from_hub(tokenizer_name)

    # ------------------------------------------------------------ calls

    def preprocess(self, inputs: Mapping[str, Any]) -> PI05ProcessedInputs:
        """Return model inputs of ``{"images", "task", "state"}``, for one sample or a batch.

        Shapes: images: num_images arrays [C, H, W] or [H, W, C], or [B, C, H, W] each, or one
        [B, num_images, C, H, W]; task: text or B texts; state [D] or [B, D].
        A long prompt is cut to tokenizer_max_length, as LeRobot does.  Raises: RequestError.
        """
        missing = [name for name in ("images", "task", "state") if name not in inputs]
        if missing:
            raise RequestError(
                f"inputs must hold images, task and state; {', '.join(missing)} missing. Add it."
            )
        task = inputs["task"]
        tasks = [task] if isinstance(task, str) else list(task)
        states = np.atleast_2d(_to_numpy(inputs["state"]).astype(np.float32))
        pixels = self._pixels(inputs["images"])
        if not len(tasks) == states.shape[0] == pixels.shape[0]:
            raise RequestError(
                "images, task and state must have one batch size; got "
                f"{pixels.shape[0]}, {len(tasks)} and {states.shape[0]}. Correct the inputs."
            )
        normalized = self._normalizer.normalize_state(states)
        rows = [
            self.tokenizer.encode(
                (state_prompt(text, state),), self.tokenizer_max_length, overlong="truncate"
            )
            for text, state in zip(tasks, normalized, strict=True)
        ]
        return PI05ProcessedInputs(
            pixel_values=pixels.to(self.device, self.params_dtype),
            input_ids=torch.from_numpy(np.stack([ids for ids, _ in rows])).to(self.device),
            lang_lens=torch.tensor([count for _, count in rows], device=self.device),
        )

    def postprocess(self, actions: Any) -> Tensor:
        """Return actions [..., H, A] in robot units on the CPU, cut to ``action_dim``."""
        array = _to_numpy(actions).astype(np.float32)
        width = self._normalizer.action_dim or self.action_dim or array.shape[-1]
        out = self._normalizer.unnormalize_actions(array[..., :width])
        return torch.from_numpy(np.ascontiguousarray(out[..., : self.action_dim]))

    def _pixels(self, images: Any) -> Tensor:
        if isinstance(images, Mapping):
            images = list(images.values())
        if isinstance(images, Tensor | np.ndarray):
            whole = torch.as_tensor(images)
            whole = whole[None] if whole.ndim == 4 else whole
            images = list(whole.unbind(1)) if whole.ndim == 5 else []
        if not isinstance(images, Sequence) or len(images) != self.num_images:
            count = len(images) if isinstance(images, Sequence) else type(images).__name__
            raise RequestError(
                f"images must be {self.num_images} arrays; got {count}. Send one per camera."
            )
        return torch.stack([self._image(image, i) for i, image in enumerate(images)], dim=1)

    def _image(self, image: Any, index: int) -> Tensor:
        x = torch.as_tensor(image)
        x = x[None] if x.ndim == 3 else x
        if x.ndim == 4 and x.shape[1] != self.num_channels and x.shape[-1] == self.num_channels:
            x = x.permute(0, 3, 1, 2)
        if x.ndim != 4 or x.shape[1] != self.num_channels or x.numel() == 0:
            raise RequestError(
                f"image {index} must be [{self.num_channels}, height, width] or "
                f"[height, width, {self.num_channels}]; got shape {list(x.shape)}. Correct it."
            )
        x = x.float() / 255.0 if x.dtype == torch.uint8 else x.float()
        if not bool(torch.isfinite(x).all()):
            raise RequestError(f"image {index} must be finite; got NaN or infinity. Check it.")
        # Float images may already be in [-1, 1]; bilinear weights cannot leave their range.
        size, limits = (self.image_size, self.image_size), (float(x.min()), float(x.max()))
        x = resize_with_pad_float(x, size, pad=self.image_pad_value, value_range=limits)
        return x * 2.0 - 1.0 if self.normalize_pixels else x

    # ------------------------------------------------------------ files

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        tokenizer: PromptTokenizer | str | Path | None = None,
        **options: Any,
    ) -> PI05Processor:
        """Return the processor that the policy_*processor.json files in ``folder`` describe.

        options: constructor arguments that the files do not hold.
        Raises: CheckpointNotFound without the files; ConfigError when they use what this class
        does not do (relative actions, other statistics for input and output).
        """
        files = read_processor_files(Path(folder))
        if files is None:
            raise CheckpointNotFound(
                f"folder must hold {PREPROCESSOR_FILE}; {str(folder)!r} has none. Check the path."
            )
        if files.relative:
            raise ConfigError(
                "PI05Processor cannot undo relative actions, which need the state of their "
                "request; this checkpoint uses them. Use phyai.models.pi.processing.Processor."
            )
        options.setdefault("tokenizer_max_length", files.max_length or 200)
        options.setdefault("tokenizer_name", files.tokenizer_name)
        processor = cls(tokenizer=tokenizer, **options)
        processor._normalizer = LerobotNormalizer(files.normalizer, files.unnormalizer)
        return processor

    def save_pretrained(self, folder: str | Path) -> None:
        """Write both processor files, and statistics beside them when there are any."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        normalizer = self._norm_json(
            "normalizer_processor", self._normalizer.state, place, PREPROCESSOR_FILE
        )
        unnormalizer = self._norm_json(
            "unnormalizer_processor", self._normalizer.action, place, POSTPROCESSOR_FILE
        )
        tokenizer = {
            "max_length": self.tokenizer_max_length,
            "task_key": "task",
            "padding_side": "right",
            "padding": "max_length",
            "truncation": True,
            "tokenizer_name": self.tokenizer_name,
        }
        pre = [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            normalizer,
            {"registry_name": STATE_PROMPT_STEP, "config": {}},
            {"registry_name": "tokenizer_processor", "config": tokenizer},
            _device_step(str(self.device)),
        ]
        _write(place / PREPROCESSOR_FILE, pre)
        _write(place / POSTPROCESSOR_FILE, [unnormalizer, _device_step("cpu")])

    def _norm_json(self, name: str, step: NormStep, place: Path, owner: str) -> dict[str, Any]:
        tensors = {
            f"{feature}.{stat}": np.ascontiguousarray(values, dtype=np.float32)
            for feature, table in (step.stats or {}).items()
            for stat, values in table.items()
        }
        features = {}
        for feature, kind in step.features.items():
            table = (step.stats or {}).get(feature, {})
            shape = next((list(values.shape) for values in table.values()), [])
            features[feature] = {"type": kind, "shape": shape}
        config = {"eps": step.eps, "features": features, "norm_map": dict(step.norm_map)}
        out: dict[str, Any] = {"registry_name": name, "config": config}
        if tensors:
            save_file(tensors, place / _STATE_FILES[owner])
            out["state_file"] = _STATE_FILES[owner]
        return out


def _device_step(device: str) -> dict[str, Any]:
    return {
        "registry_name": "device_processor",
        "config": {"device": device, "float_dtype": None},
    }


def _write(path: Path, steps: Sequence[Mapping[str, Any]]) -> None:
    data = {"name": path.stem, "steps": list(steps)}
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _stats(tables: Mapping[str, Mapping[str, Any]] | None) -> Stats | None:
    if not tables:
        return None
    stats = {
        feature: {name: np.asarray(_to_numpy(v), dtype=np.float64) for name, v in table.items()}
        for feature, table in tables.items()
    }
    mapping = default_normalization("pi05")
    for feature, kind in ((STATE, "STATE"), (ACTION, "ACTION")):
        missing = [n for n in needed_stats(mapping[kind]) if n not in stats.get(feature, {n: 0})]
        if missing:
            raise ConfigError(
                f"dataset_stats[{feature!r}] must hold {' and '.join(needed_stats(mapping[kind]))}"
                f"; {', '.join(missing)} missing. Compute quantile statistics."
            )
    return stats


def _to_numpy(values: Any) -> NDArray[Any]:
    if isinstance(values, Tensor):
        return values.detach().cpu().float().numpy()
    return np.asarray(values)
