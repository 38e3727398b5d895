"""LoRA adapters in PEFT's file format, merged into their base while it is read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from phyai.errors import CheckpointError, CheckpointNotFound, ShapeMismatch, UnexpectedTensors
from phyai.weights.matching import Remap, remapper
from phyai.weights.report import list_names, nearest_notes
from phyai.weights.safetensors_files import SafetensorsSource
from phyai.weights.tensor_source import Region, TensorInfo, TensorSource, castable

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

Number = TypeVar("Number", int, float)

_PREFIX = "base_model.model."
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<part>embedding_[AB]|[AB])(\.(?P<tail>.+))?")
_SAVED = re.compile(r"\.(modules_to_save(\.[^.]+)?|base_layer)(?=\.)")
# Other initialisations change the base's own weights, so B @ A is not the whole difference.
_PLAIN_INIT = (True, False, None, "gaussian", "orthogonal", "eva")
_UNSUPPORTED = (
    "use_dora",
    "use_qalora",
    "fan_in_fan_out",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of ``adapter_config.json`` that merging needs.

    >>> from phyai.weights import AdapterConfig
    >>> AdapterConfig(rank=4, alpha=8.0).scale("any.module")
    2.0
    """

    rank: int
    alpha: float
    rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    base: str = ""
    base_revision: str | None = None

    @classmethod
    def read(cls, folder: Path) -> AdapterConfig:
        """Return the config of an adapter folder.

        Raises: CheckpointNotFound without one; CheckpointError when it is no plain LoRA.
        """
        path = folder / ADAPTER_CONFIG
        if not path.is_file():
            raise CheckpointNotFound(f"adapter {folder} must hold {ADAPTER_CONFIG}; got none.")
        try:
            raw: dict[str, Any] = dict(json.loads(path.read_text(encoding="utf-8")))
            kind = raw.get("peft_type")
            if kind != "LORA":
                raise _unsupported(path, f"peft_type {kind!r}")
            for name in _UNSUPPORTED:
                if raw.get(name):
                    raise _unsupported(path, f"{name} = {raw[name]!r}")
            init = raw.get("init_lora_weights", True)
            if init not in _PLAIN_INIT:
                raise _unsupported(path, f"init_lora_weights = {init!r}, which alters the base")
            revision = raw.get("revision")
            ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
            for pattern in (*ranks, *alphas):
                re.compile(pattern)
            if any(int(rank) < 1 for rank in (raw.get("r", 8), *ranks.values())):
                raise ValueError("a rank below 1")
            return cls(
                rank=int(raw.get("r", 8)),
                alpha=float(raw.get("lora_alpha", 8)),
                rslora=bool(raw.get("use_rslora")),
                rank_pattern={k: int(v) for k, v in ranks.items()},
                alpha_pattern={k: float(v) for k, v in alphas.items()},
                base=str(raw.get("base_model_name_or_path") or ""),
                base_revision=None if revision is None else str(revision),
            )
        except (
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            re.error,
        ) as error:
            raise CheckpointError(
                f"file {path} must be a valid adapter config; got {error}. Export it again."
            ) from error

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale(self, module: str) -> float:
        """Return alpha / r of one module, or alpha / sqrt(r) with rank-stabilised LoRA."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


@dataclass(frozen=True, slots=True)
class _Delta:
    """W += scale * B @ A for one tensor; names are the adapter's."""

    down: str
    up: str
    scale: float
    embedding: bool


class PeftSource:
    """A base source with an adapter merged in: W + scale * B @ A, computed in float32.

    Also takes full copies (``modules_to_save``, trained biases) in place of the base's tensors.
    remap: lets names pair that differ only by what it rewrites, such as a leading ``model.``.

    Raises: see ``merge_peft``.
    """

    def __init__(
        self,
        base: TensorSource,
        folder: Path,
        *,
        config: AdapterConfig | None = None,
        remap: Remap = None,
    ) -> None:
        self._base = base
        self._label = f"{base.label} + adapter {folder}"
        self._config = config or AdapterConfig.read(folder)
        file = folder / ADAPTER_WEIGHTS
        if not file.is_file():
            raise CheckpointNotFound(
                f"adapter {folder} must hold {ADAPTER_WEIGHTS}; got none. Save it as safetensors."
            )
        self._adapter = SafetensorsSource([file])
        self._infos = dict(base.infos())
        self._deltas: dict[str, _Delta] = {}
        self._copies: dict[str, str] = {}
        self._pair(_name_finder(base.infos(), remap))

    @property
    def label(self) -> str:
        return self._label

    @property
    def merged(self) -> tuple[str, ...]:
        """Names of the base that LoRA changes."""
        return tuple(self._deltas)

    def infos(self) -> Mapping[str, TensorInfo]:
        return self._infos

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return the merged tensor (float32 where LoRA applies) or a region of it."""
        copy = self._copies.get(name)
        tensor = self._base.read(name, region) if copy is None else self._adapter.read(copy, region)
        delta = self._deltas.get(name)
        if delta is None:
            return tensor
        tensor = tensor.float() if copy is None else tensor.float().clone()
        # Cloned: a source's tensor lives until its next read only.
        up = self._adapter.read(delta.up).float().clone()
        down = self._adapter.read(delta.down).float().clone()
        left, right = (down.T, up.T) if delta.embedding else (up, down)
        if region is not None and region.dim == 0:
            left = left.narrow(0, region.start, region.length)
        elif region is not None:
            right = right.narrow(1, region.start, region.length)
        return torch.addmm(tensor, left, right, alpha=delta.scale)

    def _pair(self, find: Callable[[str], str | None]) -> None:
        """Match every adapter tensor with a tensor of the base."""
        pairs: dict[tuple[str, bool], dict[str, str]] = {}
        unmatched: list[str] = []
        for key in self._adapter.infos():
            path = key.removeprefix(_PREFIX)
            if ".original_module." in path:  # what modules_to_save replaced
                continue
            if ".lora_magnitude_vector" in path:
                raise CheckpointError(
                    f"adapter must be plain LoRA; got DoRA tensor {key!r}. Merge it with PEFT."
                )
            lora = _LORA.fullmatch(path)
            if lora is None:
                plain = _SAVED.sub("", path)
                if ".lora_" in plain:
                    unmatched.append(key)
                else:
                    self._copy(key, find(plain) or plain)
                continue
            tail = (lora["tail"] or "weight").split(".")[-1]
            if tail == "bias":
                raise CheckpointError(
                    f"adapter must be plain LoRA; got {key!r} (lora_bias). Merge it with PEFT."
                )
            embedding = lora["part"].startswith("embedding_")
            pairs.setdefault((lora["module"], embedding), {})[lora["part"][-1]] = key
        for (module, embedding), parts in pairs.items():
            name = find(f"{module}.weight")
            if name is None or set(parts) != {"A", "B"}:
                unmatched += parts.values()
            else:
                delta = _Delta(parts["A"], parts["B"], self._config.scale(module), embedding)
                self._check(name, module, delta)
                self._deltas[name] = delta
        if unmatched:
            notes = nearest_notes(
                [key.removeprefix(_PREFIX) for key in unmatched], self._infos, "the base has"
            )
            notes = {_PREFIX + key: note for key, note in notes.items()}
            raise UnexpectedTensors(
                f"adapter tensors must belong to modules of the base; got {len(unmatched)} that do "
                f"not: {list_names(unmatched, notes=notes)}. Check that {self._label} fit together."
            )

    def _copy(self, key: str, name: str) -> None:
        info = self._adapter.infos()[key]
        held = self._infos.get(name)
        if held is not None and held.shape != info.shape:
            raise ShapeMismatch(
                f"adapter tensor {key!r} must have the base's shape {list(held.shape)}; "
                f"got {list(info.shape)}. Check that {self._label} fit together."
            )
        self._copies[name] = key
        self._infos[name] = info

    def _check(self, name: str, module: str, delta: _Delta) -> None:
        info = self._infos[name]
        down, up = (self._adapter.infos()[key] for key in (delta.down, delta.up))
        rank = self._config.rank_of(module)
        rows, columns = info.shape if len(info.shape) == 2 else (-1, -1)
        out, into = (columns, rows) if delta.embedding else (rows, columns)
        if (down.shape, up.shape) != ((rank, into), (out, rank)):
            raise ShapeMismatch(
                f"LoRA of {name!r} {list(info.shape)} must be A [{rank}, in] and B [out, {rank}]; "
                f"got A {list(down.shape)}, B {list(up.shape)}. Check r, rank_pattern and the base."
            )
        dtypes = (info.dtype, down.dtype, up.dtype)
        if not all(castable(dtype, "F32") for dtype in dtypes):
            raise CheckpointError(
                f"LoRA of {name!r} must be floating point; got {dtypes}. Dequantise the base."
            )
        self._infos[name] = TensorInfo("F32", info.shape, info.file, info.start)


def _name_finder(names: Mapping[str, TensorInfo], remap: Remap) -> Callable[[str], str | None]:
    """Adapter path -> base name: equal, or equal after ``remap``."""
    rename = remapper(remap)
    renamed = {rename(name): name for name in names}

    def find(path: str) -> str | None:
        if path in names:
            return path
        new = rename(path)
        return None if new is None else renamed.get(new)

    return find


def _by_pattern(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    """The value of the first pattern that matches the module path or a dotted end of it."""
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _unsupported(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"adapter {path} must be plain LoRA; got {what}. "
        "Merge it with PEFT (merge_and_unload) and load the result."
    )
