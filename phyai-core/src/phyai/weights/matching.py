"""Pairs a model's claims with a source's tensors and finds every problem from headers alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from phyai.errors import CheckpointError, MissingTensors, ShapeMismatch, UnexpectedTensors
from phyai.weights.binding import Claim
from phyai.weights.report import list_names, nearest_notes
from phyai.weights.tensor_source import TensorInfo, castable, dtype_name

Remap: TypeAlias = "Callable[[str], str | None] | Mapping[str, str] | None"
"""Checkpoint name -> claimed name (None drops it), or substring replacements made in order."""


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor to read: its name in the source, its info, and the claim it fills."""

    stored: str
    name: str
    info: TensorInfo
    claim: Claim
    choice: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a load will do; names as the model claims them."""

    reads: tuple[Read, ...]
    missing: tuple[str, ...]
    optional_missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]


def remapper(remap: Remap) -> Callable[[str], str | None]:
    """Return a caller's renaming of stored tensors as a function; it returns None to drop one.

    >>> remapper({"policy.": ""})("policy.norm.weight")
    'norm.weight'
    """
    if remap is None:
        return lambda name: name
    if callable(remap):
        return remap
    pairs = tuple(remap.items())

    def replace(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return replace


def make_plan(
    claims: Sequence[Claim],
    infos: Mapping[str, TensorInfo],
    *,
    source: str,
    remap: Remap = None,
    ignore: Sequence[str] = (),
    strict: bool = True,
) -> Plan:
    """Return which tensor fills which claim.

    Raises: MissingTensors, UnexpectedTensors (both only when strict), ShapeMismatch,
        CheckpointError (two tensors with one name after ``remap``, a dtype that cannot be cast).
        The message lists all problems; the class is that of the first kind found.
    """
    stored, dropped = _rename(infos, remap, source)
    reads: list[Read] = []
    missing: list[str] = []
    optional_missing: list[str] = []
    alternatives: dict[str, tuple[str, ...]] = {}
    partial = {id(c.param) for c in claims if any(key in stored for key in c.keys)}
    for claim in claims:
        choice = next((i for i, key in enumerate(claim.keys) if key in stored), None)
        if choice is not None:
            name = claim.keys[choice]
            reads.append(Read(stored[name], name, infos[stored[name]], claim, choice))
        elif claim.optional and id(claim.param) not in partial:
            optional_missing.append(claim.keys[0])
        else:
            missing.append(claim.keys[0])
            alternatives[claim.keys[0]] = claim.keys[1:]
    taken = {read.name for read in reads}
    known = {key for claim in claims for key in claim.keys}
    patterns = [re.compile(pattern) for pattern in ignore]
    ignored = list(dropped)
    unexpected: list[str] = []
    for name in stored:
        if name in taken:
            continue
        skip = name in known or any(p.search(name) for p in patterns)
        (ignored if skip else unexpected).append(name)
    problems: list[tuple[type[CheckpointError], str]] = []
    if strict and missing:
        problems.append(_missing(missing, alternatives, unexpected or list(stored)))
    if strict and unexpected:
        notes = nearest_notes(
            unexpected, missing or known - taken or known, "closest of the model:"
        )
        text = f"{len(unexpected)} unexpected: {list_names(unexpected, notes=notes)}"
        problems.append((UnexpectedTensors, text))
    problems += _misfits(reads)
    if problems:
        text = ";\n  ".join(text for _, text in problems)
        raise problems[0][0](
            f"checkpoint {source} must fit the model; got\n  {text}.\n"
            "Check that checkpoint and config belong together, or pass remap or ignore."
        )
    return Plan(
        tuple(reads), tuple(missing), tuple(optional_missing), tuple(unexpected), tuple(ignored)
    )


def _rename(
    infos: Mapping[str, TensorInfo], remap: Remap, source: str
) -> tuple[dict[str, str], list[str]]:
    """Claimed name -> stored name, and the names that ``remap`` dropped."""
    rename = remapper(remap)
    stored: dict[str, str] = {}
    dropped: list[str] = []
    for old in infos:
        new = rename(old)
        if new is None:
            dropped.append(old)
        elif new in stored:
            raise CheckpointError(
                f"tensor names of {source} must stay distinct under remap; got {stored[new]!r} and "
                f"{old!r} both as {new!r}. Make remap drop one (return None)."
            )
        else:
            stored[new] = old
    return stored, dropped


def _missing(
    missing: Sequence[str], alternatives: Mapping[str, tuple[str, ...]], held: Collection[str]
) -> tuple[type[CheckpointError], str]:
    notes = {n: f" (or {', '.join(map(repr, a))})" for n, a in alternatives.items() if a}
    for name, note in nearest_notes(missing, held, "the file has").items():
        notes[name] = notes.get(name, "") + note
    return MissingTensors, f"{len(missing)} missing: {list_names(missing, notes=notes)}"


def _misfits(reads: Sequence[Read]) -> list[tuple[type[CheckpointError], str]]:
    shapes, dtypes = {}, {}
    for read in reads:
        expected, got = read.claim.shape, read.info.shape
        target = dtype_name(read.claim.param.dtype)
        if expected != got:
            shapes[read.name] = f" {list(got)} instead of {list(expected)}"
        elif not castable(read.info.dtype, target):
            dtypes[read.name] = f" {read.info.dtype} for a {target} parameter"
    found: list[tuple[type[CheckpointError], str]] = []
    if shapes:
        listed = list_names(list(shapes), notes=shapes)
        found.append((ShapeMismatch, f"{len(shapes)} of another shape: {listed}"))
    if dtypes:
        listed = list_names(list(dtypes), notes=dtypes)
        found.append((CheckpointError, f"{len(dtypes)} that cannot be cast: {listed}"))
    return found
