"""The op table: which implementation of an op fits a device, a dtype and other facts.

A choice is made once, when a layer is constructed; the layer keeps the plain callable. Building
the table imports no backend library: rows may name their function as ``"package.module:function"``,
imported when the row is chosen. A row whose import fails is refused like one that does not fit.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from phyai.errors import ConfigError, KernelUnavailable, did_you_mean
from phyai.kernels.facts import FACTS, dotted
from phyai.kernels.policy import BoundPolicy, KernelPolicy, fingerprint

if TYPE_CHECKING:
    import torch

    from phyai.kernels.autotune import Autotuner

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


class KernelTable:
    """Rows by op, the forced choices, the policy, and the log of decisions.

    rows: None for the built-in catalogue.  force: op -> name of the row to use, no fallback.
    context: dotted facts that hold for the process, see ``facts.process_facts``.

    >>> from phyai.kernels import KernelTable
    >>> silu = KernelTable().select("silu", device="cpu", dtype="float32")
    """

    def __init__(
        self,
        rows: Iterable[KernelRow] | None = None,
        *,
        force: Mapping[str, str] | None = None,
        context: Facts | None = None,
    ) -> None:
        self._rows: dict[str, list[KernelRow]] = {}
        self._force = dict(force or {})
        self._context = dict(context or {})
        self._policy: BoundPolicy | None = None
        self._tuner: Autotuner | None = None
        self._checked = False
        self._choices: dict[Choice, None] = {}
        if rows is None:
            from phyai.kernels.catalogue import CATALOGUE

            rows = CATALOGUE
        self.add(rows)

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(sorted(self._rows))

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return every distinct decision so far, oldest first."""
        return tuple(self._choices)

    @property
    def context(self) -> Facts:
        """Return the facts that hold for the process."""
        return dict(self._context)

    @property
    def policy(self) -> BoundPolicy | None:
        """Return the policy in use, bound to the present rows."""
        self._check()
        return self._policy

    @property
    def known_facts(self) -> frozenset[str]:
        """Return the facts that rows declare besides core's own."""
        rows = [row for mine in self._rows.values() for row in mine]
        return frozenset(fact for row in rows for fact in row.facts) - frozenset(FACTS)

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits over the rows: names, order, limits."""
        rows = [
            (row.op, row.name, _origin(row.fn), row.devices, row.dtypes, row.reference,
             _origin(row.predicate), row.capture_safe, row.params)
            for op in self.ops
            for row in self.rows(op)
        ]  # fmt: skip
        return fingerprint(rows)

    def use(self, policy: KernelPolicy | None, tuner: Autotuner | None = None) -> None:
        """Let a policy decide first, and a tuner measure the rows that are left; None: neither.

        Raises: ConfigError when the policy names an op, kernel or parameter that is not there.
        """
        self._tuner = tuner
        self._policy = None if policy is None else BoundPolicy(policy, self._by_op())

    def _by_op(self) -> dict[str, tuple[KernelRow, ...]]:
        return {op: self.rows(op) for op in self.ops}

    def rows(self, op: str) -> tuple[KernelRow, ...]:
        """Return the rows of an op in the order they are tried."""
        return tuple(sorted(self._known(op), key=lambda row: -row.priority))

    def add(self, rows: Iterable[KernelRow] | None) -> None:
        """Add rows, all or none. None adds nothing.

        Raises: ConfigError for a name used twice in an op, and for an op that would not have
        exactly one reference row.
        """
        merged = {op: list(old) for op, old in self._rows.items()}
        for row in rows or ():
            merged.setdefault(row.op, []).append(row)
        for op, mine in merged.items():
            names = [row.name for row in mine]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(
                    f"kernel names must be unique within op {op!r}; got {twice} twice. "
                    "Rename the added row."
                )
            references = [row.name for row in mine if row.reference]
            if len(references) != 1:
                raise ConfigError(
                    f"op {op!r} must have exactly one reference row; got {references}. "
                    "Mark one torch implementation with reference=True."
                )
        self._rows = merged
        self._checked = False

    def select(
        self, op: str, *, device: str | torch.device, dtype: str | torch.dtype, **facts: Any
    ) -> Callable[..., Any]:
        """Return the function to call for ``op`` from now on, and log the decision.

        facts: rounding, "official" keeps the rounding points of the reference, "free" does not
            (default: official on CPU, free on CUDA; fp32 rows fit either); capture=True for a
            region that will be captured; anything else a predicate looks at.
        Raises: KernelUnavailable when the op is unknown or nothing fits; ConfigError when
            ``force`` names an unknown op or row, or two policy entries of one priority match.
        """
        self._check()
        choice, fn = self._decide(op, self._facts(op, device, dtype, facts))
        self._choices[choice] = None
        if fn is None:
            why = "; ".join(f"{name}: {reason}" for name, reason in choice.refused)
            known = ", ".join(f"{name}={value}" for name, value in choice.facts)
            remedy = "Change the dtype or device"
            if op in self._force:
                remedy = "Remove the forced choice"
            elif choice.by:
                remedy = f"Change {choice.by} of the kernel policy"
            raise KernelUnavailable(
                f"op {op!r} has no implementation that fits; got {known}. Refused: {why}. "
                f"{remedy}, or install a package that provides one."
            )
        return fn

    def explain_one(
        self, op: str, *, device: str | torch.device, dtype: str | torch.dtype, **facts: Any
    ) -> Choice:
        """Return what ``select`` would decide, unlogged; its ``row`` is None when nothing fits."""
        self._check()
        return self._decide(op, self._facts(op, device, dtype, facts), preview=True)[0]

    def facts_of(
        self, op: str, *, device: str | torch.device, dtype: str | torch.dtype, **facts: Any
    ) -> dict[str, Any]:
        """Return the facts of a decision under the names a policy uses."""
        return dotted(self._facts(op, device, dtype, facts))

    def explain(self) -> str:
        """Return the log of decisions as text, one per paragraph."""
        return "\n".join(str(choice) for choice in self._choices)

    def _decide(
        self, op: str, facts: dict[str, Any], *, preview: bool = False
    ) -> tuple[Choice, Callable[..., Any] | None]:
        rows, by, fallback, params = self._candidates(op, facts)
        shown = tuple((n, _shown(v)) for n, v in facts.items() if n != "op" and "." not in n)
        refused: list[tuple[str, str]] = []
        tune = self._tuner is not None and len(rows) > 1
        fits = _fitting(rows, facts, refused, first=not tune)
        if not fits and fallback is not None:
            by = f"the fallback of {by}"
            fits = _fitting([fallback], facts, refused, first=True)
            params = {}
        if len(fits) > 1 and self._tuner is not None:
            scope = (self.fingerprint, self._policy.policy.fingerprint if self._policy else "")
            found = self._tuner.best(fits, facts, scope, measure=not preview)
            if found is not None:
                fits = [(row, fn) for row, fn in fits if row.name == found.kernel]
                refused += found.others
                by = f"measurement within {by}" if by else "measurement"
        if not fits:
            return Choice(op, shown, None, tuple(refused), by), None
        row, fn = fits[0]
        bound = functools.partial(fn, **params) if params else fn
        return Choice(op, shown, row.name, tuple(refused), by), bound

    def _candidates(
        self, op: str, facts: Facts
    ) -> tuple[Sequence[KernelRow], str, KernelRow | None, Mapping[str, Any]]:
        """Return the rows to try in order, who chose them, the row after them, and parameters."""
        rows = self.rows(op)
        forced = self._force.get(op)
        if forced is not None:
            return [row for row in rows if row.name == forced], "", None, {}
        ruling = None if self._policy is None else self._policy.decide(op, dotted(facts))
        if ruling is None:
            return rows, "", None, {}
        by_name = {row.name: row for row in rows}
        chosen = [by_name[name] for name in ruling.kernels]
        spare = [row for row in rows if row.reference and row not in chosen]
        fallback = spare[0] if ruling.fallback and spare else None
        return chosen, str(ruling.rule), fallback, ruling.rule.params

    def _facts(
        self, op: str, device: str | torch.device, dtype: str | torch.dtype, facts: Facts
    ) -> dict[str, Any]:
        kind = str(device).partition(":")[0]
        name = str(dtype).removeprefix("torch.")
        # What is known about one device says nothing about another.
        foreign = self._context.get("device.type", kind) != kind
        context = {
            fact: value
            for fact, value in self._context.items()
            if not (foreign and fact.startswith("device."))
        }
        defaults = {"rounding": "free" if kind == "cuda" else "official", "capture": False}
        return {"op": op, "device": kind, "dtype": name, **defaults, **context, **facts}

    def _known(self, op: str) -> list[KernelRow]:
        if op not in self._rows:
            raise KernelUnavailable(
                f"op must be in the kernel table; got {op!r}.{did_you_mean(op, self._rows)} "
                f"Known ops: {', '.join(self.ops)}."
            )
        return self._rows[op]

    def _check(self) -> None:
        """Check what names rows again after rows were added."""
        if self._checked:
            return
        self._check_force()
        if self._policy is not None:
            self._policy = BoundPolicy(self._policy.policy, self._by_op())
        self._checked = True

    def _check_force(self) -> None:
        for op, name in self._force.items():
            if op not in self._rows:
                raise ConfigError(
                    f"forced kernel must name a known op; got {op!r}."
                    f"{did_you_mean(op, self._rows)} Known ops: {', '.join(self.ops)}."
                )
            names = [row.name for row in self._rows[op]]
            if name not in names:
                raise ConfigError(
                    f"forced kernel of op {op!r} must be one of {', '.join(sorted(names))}; "
                    f"got {name!r}.{did_you_mean(name, names)} Correct the name."
                )


def _fitting(
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


def _origin(fn: object) -> str:
    """Return the name of a function that is the same in every process."""
    if fn is None or isinstance(fn, str):
        return fn or ""
    return f"{getattr(fn, '__module__', '')}:{getattr(fn, '__qualname__', type(fn).__name__)}"


def _refusal(row: KernelRow, facts: Facts) -> str | None:
    """Return why a row does not fit, or None."""
    for fact, allowed in (("device", row.devices), ("dtype", row.dtypes)):
        if "*" not in allowed and facts[fact] not in allowed:
            return f"{fact} {facts[fact]} is not one of {', '.join(allowed)}"
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
    if not isinstance(row.fn, str):
        return row.fn
    module, _, attribute = row.fn.partition(":")
    try:
        fn: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a broken optional backend must not take the others down
        return f"import of {row.fn} failed: {type(error).__name__}: {error}"
    return fn


def _shown(value: Any) -> Any:
    """Return a hashable form of a fact for the log."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)
