"""Fills a model from a checkpoint, or updates some of its tensors in place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from phyai.errors import CheckpointError, WeightUpdateError
from phyai.weights.binding import Claim, collect_claims
from phyai.weights.finite import is_finite
from phyai.weights.matching import Read, Remap, make_plan, remapper
from phyai.weights.opening import Source, open_source
from phyai.weights.packing import Opener, Packer, pack_all, unpacked
from phyai.weights.report import LoadReport, list_names, nearest
from phyai.weights.tensor_source import castable, dtype_name

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called as (bytes done, bytes in total, tensor name)."""


def load_pretrained(
    model: nn.Module,
    source: Source,
    *,
    remap: Remap = None,
    ignore: Sequence[str] = (),
    strict: bool = True,
    progress: Progress | None = None,
    revision: str | None = None,
) -> LoadReport:
    """Fill every claimed parameter of ``model``; then run ``post_load`` of its modules.

    source: see ``open_source``.  ignore: regular expressions, searched in names after ``remap``;
    unclaimed tensors that match are left alone.  strict: False only reports missing and
    unexpected tensors; shapes, dtypes and duplicates stay errors.

    Everything is checked from headers before the first parameter is touched. A weight that its
    kernel wants in another layout is packed as soon as it is complete.

    Raises: CheckpointNotFound, CheckpointError, MissingTensors, UnexpectedTensors, ShapeMismatch;
        DuplicateClaimError for a model that claims one tensor twice.
    """
    began = time.perf_counter()
    claims = collect_claims(model)
    tensors = open_source(source, remap=remap, revision=revision)
    plan = make_plan(
        claims, tensors.infos(), source=tensors.label, remap=remap, ignore=ignore, strict=strict
    )
    reads = sorted(plan.reads, key=lambda read: (read.info.file, read.info.start))
    sizes = [_bytes_to_read(read) for read in reads]
    total, done = sum(sizes), 0
    casts: Counter[str] = Counter()
    with torch.no_grad():
        packer = Packer(model, (read.claim.param for read in reads))
        for read, size in zip(reads, sizes, strict=True):
            claim = read.claim
            region = claim.loader.region(claim.param, claim.shard_id)
            try:
                tensor = tensors.read(read.stored, region)
            except (OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(
                    f"tensor {read.stored!r} of {read.info.file} must be readable; got {error}. "
                    "The model is partly loaded: load again."
                ) from error
            packer.writing(claim.param)
            if getattr(tensors, "stays_valid", False) and claim.loader.keeps(claim.param, tensor):
                claim.param.data = tensor
            else:
                claim.loader.copy(claim.param, tensor, claim.shard_id)
            packer.filled(claim.param)
            _remember(claim, read.choice)
            target = dtype_name(claim.param.dtype)
            if read.info.dtype != target:
                casts[f"{read.info.dtype}->{target}"] += 1
            done += size
            if progress is not None:
                progress(done, total, read.name)
    run_post_load(model)
    return LoadReport(
        loaded=tuple(read.name for read in plan.reads),
        missing=plan.missing,
        optional_missing=plan.optional_missing,
        unexpected=plan.unexpected,
        ignored=plan.ignored,
        casts=dict(casts),
        bytes_read=total,
        seconds=time.perf_counter() - began,
        source=tensors.label,
    )


def update_tensors(
    model: nn.Module,
    items: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    remap: Remap = None,
) -> tuple[str, ...]:
    """Overwrite some parameters in place (same addresses); returns the names that were applied.

    Names are the checkpoint's. Of alternative keys, one ranked below the key the parameter holds
    now is accepted but not applied. A mapping is checked whole before its first copy; of an
    iterable, each tensor before its own. ``post_load`` is left to the caller.

    Raises: WeightUpdateError for an unknown name, a wrong shape, a dtype that cannot be cast, and
    values that are not finite.
    """
    rename = remapper(remap)
    targets: dict[str, list[tuple[Claim, int]]] = {}
    for claim in collect_claims(model):
        for choice, key in enumerate(claim.keys):
            targets.setdefault(key, []).append((claim, choice))
    pairs: Iterable[tuple[str, Any]] = items.items() if isinstance(items, Mapping) else items
    if isinstance(items, Mapping):
        pairs = list(pairs)
        _refuse_clashes([name for name, _ in pairs], rename)
        for name, tensor in pairs:
            _check_update(name, tensor, rename(name), targets)
            _check_finite(name, tensor)
    applied: list[str] = []
    with torch.no_grad(), Opener(model) as opener:
        for name, tensor in pairs:
            used = False
            claims = _check_update(name, tensor, rename(name), targets)
            if not isinstance(items, Mapping):
                _check_finite(name, tensor)
            for claim, choice in claims:
                if choice > _remembered(claim):
                    continue
                region = claim.loader.region(claim.param, claim.shard_id)
                part = tensor if region is None else tensor.narrow(*region)
                opener.writing(claim.param)
                claim.loader.copy(claim.param, part, claim.shard_id)
                _remember(claim, choice)
                used = True
            if used:
                applied.append(name)
    return tuple(applied)


def run_post_load(model: nn.Module) -> None:
    """Call ``post_load()`` of every module that defines it, children before parents; then pack."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            visit(child)
        hook = getattr(module, "post_load", None)
        if callable(hook):
            with unpacked(module):
                hook()

    with torch.no_grad():
        visit(model)
        pack_all(model)


def _bytes_to_read(read: Read) -> int:
    region = read.claim.loader.region(read.claim.param, read.claim.shard_id)
    if region is None:
        return read.info.nbytes
    return read.info.nbytes * region.length // max(read.info.shape[region.dim], 1)


def _check_update(
    name: str,
    tensor: object,
    renamed: str | None,
    targets: Mapping[str, list[tuple[Claim, int]]],
) -> list[tuple[Claim, int]]:
    """The claims a tensor fills, after checking that it fits all of them."""
    if renamed is None:
        check_given(name, tensor)
        return []
    if renamed not in targets:
        close = nearest(renamed, targets)
        raise WeightUpdateError(
            f"tensor {name!r} must be one the model loads; got an unknown name. "
            + (f"Did you mean {close!r}?" if close else "Use the checkpoint's names.")
        )
    given_as = check_given(name, tensor)
    for claim, _ in targets[renamed]:
        if claim.shape != tuple(given_as.shape):
            raise WeightUpdateError(
                f"tensor {name!r} must have shape {list(claim.shape)}; got {list(given_as.shape)}. "
                "Send the full tensor as the checkpoint holds it."
            )
        given, target = dtype_name(given_as.dtype), dtype_name(claim.param.dtype)
        if not castable(given, target):
            raise WeightUpdateError(
                f"tensor {name!r} must be castable to {target}; got {given}. Dequantise it first."
            )
    return targets[renamed]


def check_given(name: str, tensor: object) -> Tensor:
    """Return what an update gives for a name.  Raises: WeightUpdateError when it has no values.

    >>> check_given("a", torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    if not isinstance(tensor, Tensor) or tensor.is_meta:
        raise WeightUpdateError(
            f"update of {name!r} must be a tensor with data; got {type(tensor).__name__}"
            f"{' on the meta device' if isinstance(tensor, Tensor) else ''}. Send the values."
        )
    if tensor.layout != torch.strided:
        raise WeightUpdateError(
            f"update of {name!r} must be a dense tensor; got {tensor.layout}. "
            "Call to_dense() first."
        )
    return tensor


def _check_finite(name: str, tensor: Tensor) -> None:
    if not is_finite(tensor):
        raise WeightUpdateError(
            f"tensor {name!r} must be finite; got NaN or infinity. Keep the last good weights."
        )


def _refuse_clashes(names: Sequence[str], rename: Callable[[str], str | None]) -> None:
    counts = Counter(new for new in map(rename, names) if new is not None)
    clashes = [name for name in names if counts[rename(name) or ""] > 1]
    if clashes:
        raise WeightUpdateError(
            f"updated names must stay distinct under remap; got {list_names(clashes)}. "
            "Send each tensor once."
        )


def _remember(claim: Claim, choice: int) -> None:
    """Note on the parameter which of its alternative keys it holds."""
    attributes: Any = claim.param
    held = dict(getattr(claim.param, "hf_choice", {}))
    held[claim.shard_id] = choice
    attributes.hf_choice = held


def _remembered(claim: Claim) -> int:
    held: dict[int | None, int] = getattr(claim.param, "hf_choice", {})
    return held.get(claim.shard_id, len(claim.keys))
