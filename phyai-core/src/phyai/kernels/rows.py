"""Rows of the op table: what an implementation is, when it fits, and how a decision is told."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from phyai.errors import KernelUnavailable
from phyai.kernels.packing import Pack

Facts: TypeAlias = Mapping[str, Any]
"""What a predicate sees: op, device ("cpu"), dtype ("float32"), rounding, capture, and the rest."""

Predicate: TypeAlias = Callable[[Facts], "bool | str"]
"""True: the row fits. False, or a sentence that says why not: it does not."""

REFERENCE, GENERAL, OPTIMIZED, SPECIALIZED = 0, 100, 200, 300
"""Usual priorities; the fitting row with the highest one wins, the earlier row at a tie."""

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One implementation of one op.

    fn: the callable, or ``"package.module:function"`` to import it only when chosen.
    devices, dtypes: names it runs on; ``("*",)`` for any.
    reference: the eager truth of the op; each op has exactly one.
    capture_safe: may run while a graph is being captured.
    params: keyword arguments of fn that a policy may set.
    facts: dotted facts (``attrs.beam``) that callers of the op pass, besides core's own.
    pack: of linear rows that keep weights in a layout of their own, a ``Pack`` or its name; fn then
        takes its result in place of the weight, and only callers that pack (``Linear``) get it.
    epilogues: what a linear row does to its result in the same pass; ``Linear`` adds the others.
    formats: quantised formats a row runs, as ``quant_format`` writes them; "" is none.
    rounded_inputs: a row of quantised inputs also takes them rounded: ``QuantizedActivations``.

    >>> from phyai.kernels import KernelRow, KernelTable
    >>> table = KernelTable()
    >>> table.add([KernelRow("silu", "mine.silu", lambda x: x / (1 + (-x).exp()), priority=50)])
    >>> table.explain_one("silu", device="cpu", dtype="float32").row
    'mine.silu'
    """

    op: str
    name: str
    fn: Callable[..., Any] | str
    devices: tuple[str, ...] = ("*",)
    dtypes: tuple[str, ...] = FLOATS
    predicate: Predicate | None = None
    priority: int = GENERAL
    reference: bool = False
    capture_safe: bool = True
    params: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    pack: Pack | str | None = None
    epilogues: tuple[str, ...] = ("none",)
    formats: tuple[str, ...] = ("",)
    rounded_inputs: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """What a decision gives: the function, bound to a policy's parameters, and its row."""

    fn: Callable[..., Any]
    row: KernelRow

    @property
    def pack(self) -> Pack | None:
        """Return the function that lays out weights for ``fn``; None = it takes them as they are.

        Raises: KernelUnavailable when it cannot be imported.
        """
        if self.row.pack is None or not isinstance(self.row.pack, str):
            return self.row.pack
        found = _imported(self.row.pack)
        if isinstance(found, str):
            raise KernelUnavailable(f"kernel {self.row.name} must be complete; {found}.")
        return found


@dataclass(frozen=True)
class Choice:
    """One decision: the facts, the row that won, why, and why each row before it was refused.

    by: the policy entry or the measurement that decided; "" for the catalogue's order.
    """

    op: str
    facts: tuple[tuple[str, Any], ...]
    row: str | None
    refused: tuple[tuple[str, str], ...] = ()
    by: str = ""

    def __str__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.facts)
        by = f" by {self.by}" if self.by else ""
        line = f"{self.op} -> {self.row or 'nothing fits'}{by}  [{facts}]"
        return "\n".join([line, *(f"    not {name}: {why}" for name, why in self.refused)])


def fitting(
    rows: Iterable[KernelRow], facts: Facts, refused: list[tuple[str, str]], *, first: bool
) -> list[tuple[KernelRow, Callable[..., Any]]]:
    """Return the rows that fit with their functions, the first one or all; note the others."""
    fits: list[tuple[KernelRow, Callable[..., Any]]] = []
    for row in rows:
        problem = _refusal(row, facts)
        if problem is None:
            fn = _load(row)
            if not isinstance(fn, str):
                fits.append((row, fn))
                if first:
                    break
                continue
            problem = fn
        refused.append((row.name, problem))
    return fits


def origin(fn: object) -> str:
    """Return the name of a function that is the same in every process."""
    if fn is None or isinstance(fn, str):
        return fn or ""
    return f"{getattr(fn, '__module__', '')}:{getattr(fn, '__qualname__', type(fn).__name__)}"


def _refusal(row: KernelRow, facts: Facts) -> str | None:
    """Return why a row does not fit, or None."""
    for fact, allowed in (("device", row.devices), ("dtype", row.dtypes)):
        if "*" not in allowed and facts[fact] not in allowed:
            return f"{fact} {facts[fact]} is not one of {', '.join(allowed)}"
    if row.pack is not None and not facts.get("packed"):
        return "takes packed weights only"
    if (form := quant_format(facts)) not in row.formats:
        runs = " or ".join(known or "plain" for known in row.formats)
        return f"runs {runs} weights, not {form or 'plain'} ones"
    if facts["capture"] and not row.capture_safe:
        return "cannot run inside a captured graph"
    if row.predicate is None:
        return None
    try:
        verdict = row.predicate(facts)
    except KeyError as missing:
        return f"needs to know the fact {missing}"
    if isinstance(verdict, str):
        return verdict
    return None if verdict else "its predicate refused these facts"


def _load(row: KernelRow) -> Callable[..., Any] | str:
    """Return the row's function, or the sentence that says why it cannot be imported."""
    return _imported(row.fn) if isinstance(row.fn, str) else row.fn


def _imported(name: str) -> Callable[..., Any] | str:
    module, _, attribute = name.partition(":")
    try:
        fn: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a broken optional backend must not take the others down
        return f"import of {name} failed: {type(error).__name__}: {error}"
    return fn


def quant_format(facts: Facts) -> str:
    """Return ``weight:input`` of a quantised layer, ``weight`` with plain inputs, "" of others.

    >>> from phyai.kernels.rows import quant_format
    >>> quant_format({"quant.weight": "int8", "quant.input": "int8"}), quant_format({})
    ('int8:int8', '')
    """
    weight, taken = facts.get("quant.weight", ""), facts.get("quant.input")
    return f"{weight}:{taken}" if taken else str(weight)


def shown(value: Any) -> Any:
    """Return a hashable form of a fact for the log."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
