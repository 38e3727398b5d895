"""The op table: which implementation of an op fits a device, a dtype and other facts.

A choice is made once, when a layer is constructed; the layer keeps the plain callable. Building
the table imports no backend library: rows may name their function as ``"package.module:function"``,
imported when the row is chosen. A row whose import fails is refused like one that does not fit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from phyai.errors import ConfigError, KernelUnavailable, did_you_mean
from phyai.kernels.facts import FACTS, dotted
from phyai.kernels.policy import BoundPolicy, KernelPolicy, fingerprint
from phyai.kernels.rows import Choice, Facts, Kernel, KernelRow, fitting, origin, shown

if TYPE_CHECKING:
    import torch

    from phyai.kernels.autotune import Autotuner


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
            (row.op, row.name, origin(row.fn), row.devices, row.dtypes, row.reference,
             origin(row.predicate), row.capture_safe, row.params, origin(row.pack), row.epilogues,
             row.formats)
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

    def freeze(self) -> None:
        """Measure nothing from now on; later decisions follow what is known and the order."""
        self._tuner = None

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
        """Return the function to call for ``op`` from now on; see ``choose``."""
        return self.choose(op, device=device, dtype=dtype, **facts).fn

    def choose(
        self, op: str, *, device: str | torch.device, dtype: str | torch.dtype, **facts: Any
    ) -> Kernel:
        """Decide for ``op``, and log the decision.

        facts: rounding, "official" keeps the rounding points of the reference, "free" does not
            (default: official on CPU, free on CUDA; fp32 rows fit either); capture=True for a
            region that will be captured; packed=True from callers that pack weights; anything
            else a predicate looks at.
        Raises: KernelUnavailable when the op is unknown or nothing fits; ConfigError when
            ``force`` names an unknown op or row, or two policy entries of one priority match.
        """
        self._check()
        choice, kernel = self._decide(op, self._facts(op, device, dtype, facts))
        self._choices[choice] = None
        if kernel is None:
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
        return kernel

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
    ) -> tuple[Choice, Kernel | None]:
        rows, by, fallback, params = self._candidates(op, facts)
        told = tuple((n, shown(v)) for n, v in facts.items() if _worth_telling(n))
        refused: list[tuple[str, str]] = []
        tune = self._tuner is not None and len(rows) > 1
        fits = fitting(rows, facts, refused, first=not tune)
        if not fits and fallback is not None:
            by = f"the fallback of {by}"
            fits = fitting([fallback], facts, refused, first=True)
            params = {}
        if len(fits) > 1 and self._tuner is not None:
            scope = (self.fingerprint, self._policy.policy.fingerprint if self._policy else "")
            found = self._tuner.best(fits, facts, scope, measure=not preview)
            if found is not None:
                fits = [(row, fn) for row, fn in fits if row.name == found.kernel]
                refused += found.others
                by = f"measurement within {by}" if by else "measurement"
        if not fits:
            return Choice(op, told, None, tuple(refused), by), None
        row, fn = fits[0]
        bound = functools.partial(fn, **params) if params else fn
        return Choice(op, told, row.name, tuple(refused), by), Kernel(bound, row)

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


def _worth_telling(fact: str) -> bool:
    """Return whether a fact differs between decisions of one process."""
    return fact != "op" and ("." not in fact or fact.startswith("quant."))
